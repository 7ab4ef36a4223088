"""The engine is killed, stopped and made to fail under load; every answer must be complete and the right one.

    death    SIGKILL, SIGSEGV and SIGSTOP of the engine process under many streams, then many kills in a row
    drain    SIGTERM with streams and waiting requests, and with too little time, also if the engine is stopped
    faults   a request that raises at each seam of a step, and one that crashes the engine, beside many others

Every answer is compared with that of an undisturbed run: texts, log probabilities, finish reasons, counts. Prints a
table for each part and exits 1 if a number is not as promised in docs/reliability.md.

    .venv/bin/python tools/chaos.py                                  # the bundled model, everything
    .venv/bin/python tools/chaos.py --model DIR --parts faults --neighbours 20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_client import LARGE_KINDS, Got, LiveServer, bodies, same
from faulty_server import SEAMS, bias_for

PARTS = ("death", "drain", "faults")
# Seconds that a drain may take, and what the engine gets just before.
DRAINS: dict[str, tuple[float, signal.Signals | None]] = {
    "in time": (300.0, None),
    "engine killed": (300.0, signal.SIGKILL),
    "too short": (1.0, None),
    "engine stopped": (1.0, signal.SIGSTOP),
}
BACK_S = {"SIGKILL": 6.0, "SIGSEGV": 6.0, "SIGSTOP": 10.0}


@dataclass(slots=True)
class Table:
    """Rows of figures, and whether each is as promised."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, name: str, values: Sequence[object], checks: dict[str, bool]) -> None:
        """A row; the checks that are not true make it a fault."""
        bad = [words for words, is_good in checks.items() if not is_good]
        self.faults += [f"{self.title}, {name}: {words}" for words in bad]
        shown = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
        self.rows.append([name, *shown, "ok" if not bad else "; ".join(bad)])
        print(" ".join(self.rows[-1]), file=sys.stderr, flush=True)

    def __str__(self) -> str:
        lines = [["", *self.columns, "verdict"], *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
        text = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines]
        text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        return "\n".join([f"\n{self.title}", *text])


@dataclass(frozen=True, slots=True)
class Setup:
    """What all parts share."""

    engine: dict[str, object]
    folder: Path
    streams: int = 40
    kills: int = 100
    neighbours: int = 100
    max_tokens: int = 48
    back_s: float = 1.0  # times the promised seconds of a restart, an exit, a server that gets unready
    stall_s: float = 3.0
    seams: Sequence[str] = SEAMS

    @contextmanager
    def serving(self, **server: object) -> Iterator[LiveServer]:
        # Every request is to be taken: how long one waits is not what is tested.
        options = {"shutdown_grace_s": 300.0, "stall_s": self.stall_s, "max_queue_s": 1e6, **server}
        live = LiveServer(self.engine, options, self.folder / "server.log")
        try:
            yield live
        finally:
            live.close()


async def ask_all(server: LiveServer, asks: Sequence[dict[str, Any]]) -> list[Got]:
    return await asyncio.gather(*(server.ask(body) for body in asks))


def num_same(golden: Sequence[Got], got: Sequence[Got]) -> int:
    for index, (one, two) in enumerate(zip(golden, got, strict=True)):
        if one.is_complete and two.is_complete and not same(one, two):
            print(f"answer {index} differs:\n  {one.content}\n  {two.content}", file=sys.stderr)
    return sum(same(one, two) for one, two in zip(golden, got, strict=True))


async def until_begun(begun: Sequence[asyncio.Event], count: int) -> None:
    while sum(event.is_set() for event in begun) < count:
        await asyncio.sleep(0.005)


async def watch_ready(server: LiveServer, since: float) -> float:
    """Seconds from `since` until the server, which gets unready first, takes requests again."""
    while (await server.get("/ready"))[0] == 200:
        assert time.monotonic() - since < 60, "the server never got unready"
        await asyncio.sleep(0.01)
    while (await server.get("/ready"))[0] != 200:
        assert (await server.get("/health"))[0] == 200, "/health is not 200 while the engine is replaced"
        assert time.monotonic() - since < 120, "the engine did not come back"
        await asyncio.sleep(0.02)
    return time.monotonic() - since


async def death(setup: Setup) -> list[Table]:
    asks = bodies(setup.streams, setup.max_tokens) + bodies(8, setup.max_tokens, seed=1000, streams=False)
    table = Table(
        f"engine process ended under {setup.streams} streams and 8 whole answers",
        ("answers", "complete", "same", "errors", "hangs", "cut", "refused", "engine back s", "longest pause s"),
    )
    with setup.serving() as server:
        golden = await ask_all(server, asks)
        assert all(got.is_complete for got in golden), "the undisturbed run is not complete"
        for name, back_s in BACK_S.items():
            begun = [asyncio.Event() for _ in asks]
            running = [asyncio.create_task(server.ask_again(*each)) for each in zip(asks, begun, strict=True)]
            await until_begun(begun, setup.streams // 2)
            pid = server.engine()
            assert pid is not None
            os.kill(pid, signal.Signals[name])
            took_s = await watch_ready(server, time.monotonic())
            got = await asyncio.gather(*running)
            free, total = await settled_blocks(server)
            row = _counts(golden, got)
            checks = {
                "not all complete": row["complete"] == len(asks),
                "not all the same": row["same"] == len(asks),
                "back too late": took_s <= back_s * setup.back_s,
                "same process": server.engine() != pid,
                "process not reaped": not Path(f"/proc/{pid}").exists(),
                "blocks leaked": free == total,
            }
            table.add(name, [*row.values(), took_s, max(each.longest_gap_s for each in got)], checks)
        kills = await many_kills(setup, server, golden, asks)
    return [table, kills]


def _counts(golden: Sequence[Got], got: Sequence[Got]) -> dict[str, int]:
    return {
        "answers": len(got),
        "complete": sum(each.is_complete for each in got),
        "same": num_same(golden, got),
        "errors": sum(each.error is not None for each in got),
        "hangs": sum(each.has_hung for each in got),
        "cut": sum(each.status == 200 and not each.is_done for each in got),
        "refused": sum(each.num_refused > 0 for each in got),  # came after the kill, and again later
    }


async def settled_blocks(server: LiveServer) -> tuple[float, float]:
    """Free blocks and all, a second later at most."""
    deadline = time.monotonic() + 1
    while (found := await server.free_blocks())[0] != found[1] and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return found


async def many_kills(setup: Setup, server: LiveServer, golden: Sequence[Got], asks: Sequence[dict[str, Any]]) -> Table:
    """Kill whenever the engine is back and a token has come, while clients ask without pause."""
    table = Table(
        f"{setup.kills} kills in a row",
        ("kills", "answers", "same", "errors", "refused", "descriptors", "children", "server MB"),
    )
    is_over = False
    got: list[tuple[int, Got]] = []
    progress = asyncio.Event()
    refused = 0

    async def client(index: int) -> None:
        nonlocal refused
        while not is_over:
            begun = asyncio.Event()
            asking = asyncio.create_task(server.ask(asks[index], begun))
            waiting = asyncio.create_task(begun.wait())
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            progress.set()
            answer = await asking
            if answer.is_refused:
                refused += 1
                await asyncio.sleep(0.2)
            else:
                got.append((index, answer))

    clients = [asyncio.create_task(client(index)) for index in range(min(8, len(asks)))]
    before = (0, 0, 0.0)
    for number in range(setup.kills):
        await server.until_ready()
        progress.clear()
        await progress.wait()
        pid = server.engine()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        await watch_ready(server, time.monotonic())
        if number == min(4, setup.kills // 2):
            before = server.num_descriptors(), server.num_children(), server.memory_mb()
    is_over = True
    await asyncio.gather(*clients)
    await server.until_ready()
    await asyncio.sleep(0.5)  # closed connections leave
    after = server.num_descriptors(), server.num_children(), server.memory_mb()
    num_right = sum(same(golden[index], answer) for index, answer in got)
    errors = sum(answer.error is not None for _, answer in got)
    free, total = await settled_blocks(server)
    shown = [f"{a} -> {b}" for a, b in zip(before[:2], after[:2], strict=True)]
    checks = {
        "not all the same": num_right == len(got) > 0,
        "descriptors leaked": after[0] <= before[0] + 2,
        "processes leaked": after[1] <= before[1],
        "memory grew": after[2] <= before[2] + 30,
        "blocks leaked": free == total,
    }
    memory = f"{before[2]:.0f} -> {after[2]:.0f}"
    table.add("SIGKILL", [setup.kills, len(got), num_right, errors, refused, *shown, memory], checks)
    return table


async def drain(setup: Setup) -> list[Table]:
    slots = max(1, setup.streams * 5 // 4)
    table = Table(
        f"SIGTERM with {slots} streams and {slots} waiting requests",
        ("grace s", "answers", "same", "error events", "refused", "cut", "unready ms", "exit after s", "exit code"),
    )
    asks = bodies(2 * slots, setup.max_tokens, more=LARGE_KINDS[:1])
    setup = replace(setup, engine={**setup.engine, "max_num_seqs": slots})
    with setup.serving() as server:
        golden = await ask_all(server, asks)
    for name, (grace_s, sig) in DRAINS.items():
        with setup.serving(shutdown_grace_s=grace_s, stall_s=0.0 if sig is signal.SIGSTOP else setup.stall_s) as server:
            begun = [asyncio.Event() for _ in asks]
            running = [asyncio.create_task(server.ask(*each)) for each in zip(asks, begun, strict=True)]
            await until_begun(begun, slots * 3 // 4)  # some streams have several answers, each with a slot
            await server.until_taken(sum(ask.get("n", 1) for ask in asks))  # one that comes later is refused
            if sig is not None:
                os.kill(server.engine() or 0, sig)
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            unready_ms = await _until_unready(server, started)
            code = await asyncio.to_thread(server.process.wait)
            exit_s = time.monotonic() - started
            got = await asyncio.gather(*running)
        num_right = num_same(golden, got)
        events = sum(each.status == 200 and each.error is not None and each.is_done for each in got)
        refused = sum(each.status == 503 for each in got)
        cut = len(got) - num_right - events - refused
        checks = {
            "exit code": code == 0,
            "unready too late": unready_ms <= 100 * setup.back_s,
            "answers cut off without a word": cut == 0,
            "not all complete": num_right == len(got) or grace_s < 10,
            "exit too late": exit_s <= grace_s + setup.back_s,
        }
        values = [grace_s, len(got), num_right, events, refused, cut, unready_ms, exit_s, code]
        table.add(name, values, checks)
    return [table]


async def _until_unready(server: LiveServer, since: float) -> float:
    while (await server.get("/ready"))[0] == 200:
        pass
    return 1e3 * (time.monotonic() - since)


async def faults(setup: Setup) -> list[Table]:
    table = Table(
        f"one request that fails beside {setup.neighbours} others",
        ("status", "retry", "error event", "neighbours", "same", "engine processes"),
    )
    asks = bodies(setup.neighbours, setup.max_tokens)
    with setup.serving() as server:
        golden = await ask_all(server, asks)
        assert all(got.is_complete for got in golden), "the undisturbed run is not complete"
        for seam in setup.seams:
            # A whole answer has a status of its own; at the seam of streaming only a stream fails.
            culprit = {**asks[0], "temperature": 0.5, "logit_bias": bias_for(seam), "stream": seam == "stream"}
            culprit.pop("stream_options")
            pid = server.engine()
            half = len(asks) // 2
            got = await ask_all(server, [*asks[:half], culprit, *asks[half:]])
            bad = got.pop(half)
            await server.until_ready()
            is_same = server.engine() == pid
            free, total = await settled_blocks(server)
            is_event = bad.status == 200 and bad.error is not None and bad.is_done
            is_failed = (bad.status, bad.headers.get("x-should-retry")) == (500, "false")
            if seam == "stream":  # which of the two depends on whether its first event was out
                is_failed = is_failed or is_event
            num_right = num_same(golden, got)
            said = server.log.read_text()
            words = {"mask": "a mask of row", "crash": "SIGSEGV", "hang": "its step does not end"}
            checks = {
                "the fault was not met": words.get(seam, f"told to fail at {seam}") in said,
                "the culprit did not fail as promised": is_failed,
                "neighbours differ": num_right == len(asks),
                "another engine process": is_same or seam in ("crash", "hang"),
                "blocks leaked": free == total,
            }
            retry = bad.headers.get("x-should-retry", "-")
            table.add(seam, [bad.status, retry, is_event, len(got), num_right, "1" if is_same else "more"], checks)
    return [table]


def run(setup: Setup, parts: Sequence[str]) -> list[Table]:
    """All tables of these parts."""
    work: dict[str, Callable[[Setup], Any]] = {"death": death, "drain": drain, "faults": faults}
    return [table for part in parts for table in asyncio.run(work[part](setup))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of death,drain,faults")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--neighbours", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--back-factor", type=float, default=1.0, help="times the promised seconds, on a busy machine")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts has {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(
            *({"model": args.model}, Path(folder), args.streams, args.kills, args.neighbours, args.max_tokens),
            args.back_factor,
        )
        tables = run(setup, parts)
    print("\n".join(map(str, tables)))
    wrong = [fault for table in tables for fault in table.faults]
    print("\n" + ("\n".join(wrong) if wrong else "everything is as promised"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
