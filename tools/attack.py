"""Attacks a server with what is expensive to refuse, and measures what its other clients notice.

    tools/attack.py                                  start `headway serve` and attack it for 30 s
    tools/attack.py --seconds 120 --model my.gguf    longer, another model
    tools/attack.py --url http://127.0.0.1:8000 --pid 4711

Eight streams run throughout, and /health is asked every 20 ms. First without an attack, then while clients send without
pause prompts of 8 MB, chats of 280,000 messages, a logit_bias of 8 MB, and bodies that come byte by byte. Printed are
the times between two events of a stream, the times of /health, and the resident memory of the server's processes. Exit
status 1: a bar was missed (P99.9 of gaps 250 ms, /health 100 ms, 512 MB more memory).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

MEGABYTE = 1 << 20
MAX_GAP_S, MAX_HEALTH_S, MAX_MEMORY_MB = 0.25, 0.1, 512
SERVE = "import sys; from headway.cli.main import main; sys.exit(main())"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def hostile() -> dict[str, tuple[str, bytes]]:
    """Path and body of each attack, at most 8 MiB."""
    message = b'{"role":"user","content":""},'
    bias = b",".join(b'"%d":1' % index for index in range(800_000))
    return {
        "8 MB prompt, words": (TEXT, b'{"prompt":"%b"}' % (b"tell me more " * (8 * MEGABYTE // 13 - 8))),
        "8 MB prompt, one word": (TEXT, b'{"prompt":"%b"}' % (b"a" * (8 * MEGABYTE - 20))),
        "8 MB chat message": (
            CHAT,
            b'{"messages":[{"role":"user","content":"%b"}]}' % (b"ab " * (8 * MEGABYTE // 3 - 99)),
        ),
        "280,000 messages": (CHAT, b'{"messages":[%b]}' % (message * 280_000)[:-1]),
        "60,000 messages": (CHAT, b'{"messages":[%b]}' % (message * 60_000)[:-1]),
        "giant logit_bias": (TEXT, b'{"prompt":"x","logit_bias":{%b}}' % bias[: 8 * MEGABYTE - 40]),
    }


@dataclass
class Phase:
    """What was measured while it lasted."""

    name: str
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)

    def row(self) -> str:
        cells = [
            *(f"{1e3 * quantile(self.gaps, q):.0f}" for q in (0.5, 0.99, 0.999, 1)),
            *(f"{1e3 * quantile(self.health, q):.1f}" for q in (0.5, 0.99, 1)),
            *(f"{pick(self.memory_mb):.0f}" for pick in (min, max)),
        ]
        return f"{self.name:<12} {len(self.gaps):>7} " + " ".join(f"{cell:>8}" for cell in cells)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def exchange(url: str, path: str, body: bytes, method: str = "POST") -> int:
    """One request on a connection of its own; the status."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head(path, len(body), method))
        writer.write(body)
        with suppress(ConnectionError):
            await writer.drain()
        line = await reader.readline()
        await reader.read()
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()


def head(path: str, length: int, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close"]
    lines += ["content-type: application/json", f"content-length: {length}"] if method == "POST" else []
    return "\r\n".join([*lines, "", ""]).encode()


async def stream(url: str, number: int, phases: list[Phase]) -> None:
    """Streams without end; the times between the events of each belong to the phase of the later one."""
    parts = urlsplit(url)
    for turn in itertools.count():
        ask = {
            "prompt": f"Story {number} {turn}: once upon a time",
            "max_tokens": 256,
            "stream": True,
            "ignore_eos": True,
        }
        body = json.dumps(ask).encode()
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head(TEXT, len(body)) + body)
        last: float | None = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last is not None:
                    phases[-1].gaps.append(now - last)
                last = now
        assert last is not None, "a stream was refused"
        writer.close()


async def probe(url: str, phases: list[Phase]) -> None:
    while True:
        begun = time.monotonic()
        assert await exchange(url, "/health", b"", "GET") == 200
        phases[-1].health.append(time.monotonic() - begun)
        await asyncio.sleep(0.02)


async def weigh(pid: int, phases: list[Phase]) -> None:
    while True:
        phases[-1].memory_mb.append(resident_mb(pid))
        await asyncio.sleep(0.25)


def resident_mb(pid: int) -> float:
    """Of a process and its children."""
    total = 0.0
    with suppress(OSError, AttributeError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        total += int(found[1]) / 1024  # type: ignore[index]
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident_mb(int(child)) for child in (task / "children").read_text().split())
    return total


async def attack(url: str, num_dribbled: int) -> None:
    """Send what is hostile, each kind without pause, until killed; every second a line of statuses."""
    counts: Counter[str] = Counter()

    async def repeat(name: str, path: str, body: bytes) -> None:
        while True:
            with suppress(OSError):
                counts[f"{name}: {await exchange(url, path, body)}"] += 1

    async def dribble() -> None:
        parts = urlsplit(url)
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.write(head(TEXT, 10_000))
                answered = asyncio.create_task(reader.readline())
                while not answered.done():
                    writer.write(b" ")
                    await asyncio.sleep(0.05)
                counts[f"dribbled body: {answered.result().split()[1].decode()}"] += 1
                writer.close()

    async def report() -> None:
        while True:
            await asyncio.sleep(1)
            print(json.dumps(counts), flush=True)

    kinds = [repeat(name, *what) for name, what in hostile().items()]
    await asyncio.gather(report(), *kinds, *(dribble() for _ in range(num_dribbled)))


async def measure(url: str, pid: int, seconds: float, num_dribbled: int) -> list[Phase]:
    phases = [Phase("warm-up")]
    work = [asyncio.create_task(stream(url, number, phases)) for number in range(8)]
    work += [asyncio.create_task(probe(url, phases)), asyncio.create_task(weigh(pid, phases))]

    async def last(phase: Phase) -> None:
        phases.append(phase)
        await asyncio.wait(work, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in work:
            if task.done():
                task.result()

    try:
        await asyncio.sleep(3)
        await last(Phase("quiet"))
        # A process of its own: what the attack costs its sender is not what the streams are measured by.
        command = [sys.executable, __file__, "--attack", url, "--dribbled", str(num_dribbled)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
            assert attacker.stdout is not None
            await asyncio.to_thread(attacker.stdout.readline)  # it has begun
            await last(Phase("attacked"))
            attacker.kill()
            lines = attacker.stdout.read().splitlines()
        print("answers to the attack:")
        for name, count in sorted(json.loads(lines[-1]).items()):
            print(f"  {count:>6}  {name}")
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return phases[1:]


@contextmanager
def started(model: list[str], log: Path) -> Iterator[tuple[str, int]]:
    with log.open("w") as errors:
        command = [sys.executable, "-c", SERVE, "serve", *model, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"http://\S+", process.stdout.readline())
                if found is None:
                    raise SystemExit(f"the server did not start: {log.read_text()[-500:]}")
                yield found.group(), process.pid
            finally:
                process.terminate()


def show(phases: list[Phase]) -> bool:
    """Print the table; whether every bar was met."""
    print("                     ITL of 8 streams, ms                /health, ms                 resident, MB")
    names = ("P50", "P99", "P99.9", "most", "P50", "P99", "most", "least", "most")
    print(f"{'':<12} {'events':>7} " + " ".join(f"{name:>8}" for name in names))
    for phase in phases:
        print(phase.row())
    quiet, attacked = phases
    bars = {
        f"P99.9 of gaps <= {1e3 * MAX_GAP_S:.0f} ms": quantile(attacked.gaps, 0.999) <= MAX_GAP_S,
        f"/health <= {1e3 * MAX_HEALTH_S:.0f} ms": max(attacked.health) <= MAX_HEALTH_S,
        f"memory + <= {MAX_MEMORY_MB} MB": max(attacked.memory_mb) - max(quiet.memory_mb) <= MAX_MEMORY_MB,
    }
    for name, is_met in bars.items():
        print(f"{'met   ' if is_met else 'MISSED'}  {name}")
    return all(bars.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of each phase")
    parser.add_argument("--model", help="instead of the bundled one")
    parser.add_argument("--url", help="of a server that runs already; needs --pid")
    parser.add_argument("--pid", type=int, help="process of that server, whose memory is measured")
    parser.add_argument("--dribbled", type=int, default=100, help="connections whose bodies come byte by byte")
    parser.add_argument("--log", type=Path, default=Path("attack.log"), help="where the started server logs")
    parser.add_argument("--attack", metavar="URL", help="only attack, until killed")
    given = parser.parse_args()
    if given.attack:
        asyncio.run(attack(given.attack, given.dribbled))
        return 0
    if given.url and not given.pid:
        parser.error("--url needs --pid, the process whose memory is measured")
    if given.url:
        return 0 if show(asyncio.run(measure(given.url, given.pid, given.seconds, given.dribbled))) else 1
    with started([given.model] if given.model else [], given.log) as (url, pid):
        return 0 if show(asyncio.run(measure(url, pid, given.seconds, given.dribbled))) else 1


if __name__ == "__main__":
    sys.exit(main())
