"""Engines that joined a front are killed, stopped, drained and added under load; every answer must be the right one.

    kill     `kills` times SIGKILL of one of the engines, own and joined ones, while clients ask half of the time
    stop     likewise SIGSTOP, which closes no connection
    roll     each joined engine is ended (SIGTERM) and started again, one is added and drained, own ones are restarted
    poison   a request that crashes every engine that computes it, beside others
    fronts   two fronts share the engines; one is killed, and its clients ask the other

Every answer is compared with that of an undisturbed run: texts, log probabilities, finish reasons, counts. Prints a
table and exits 1 if a number is not as promised.

    .venv/bin/python tools/chaos_joined.py                        # the bundled model, everything
    .venv/bin/python tools/chaos_joined.py --parts kill --kills 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import Setup, Table
from chaos_client import LARGE_KINDS, Got, LiveServer, bodies, same
from faulty_server import VARIABLE, bias_for

PARTS = ("kill", "stop", "roll", "poison", "fronts")
COLUMNS = ("answers", "same", "errors", "refused", "cut", "longest pause s", "engines ended", "seconds")
JOINER = str(Path(__file__).parent / "faulty_joiner.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@dataclass
class Keeper:
    """One engine that joins, and that is started again when it has ended."""

    name: str
    model: str
    join: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    num_ended: int = 0

    def start(self) -> None:
        orders = json.dumps({"model": self.model, "threads": 1, "join": self.join, "name": self.name})
        with (self.folder / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, JOINER, orders]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, VARIABLE: "1"})

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def revive(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            self.num_ended += 1
            self.start()

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait()


@dataclass
class Joined:
    """A front, its joined engines, and the answers of an undisturbed run."""

    server: LiveServer
    admin: Path
    keepers: list[Keeper]
    asks: Sequence[dict[str, Any]]
    others: list[LiveServer] = field(default_factory=list)
    golden: list[Got] = field(default_factory=list)

    async def replicas(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(_admin, self.admin, "GET", "/replicas")

    async def until(self, count: int, limit_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait for so many replicas that take requests; those that have ended are started again."""
        began = time.monotonic()
        while True:
            for keeper in self.keepers:
                keeper.revive()
            rows = await self.replicas()
            if sum(bool(row["is_up"]) for row in rows) == count:
                return rows
            assert time.monotonic() - began < limit_s, rows
            await asyncio.sleep(0.03)


def _admin(path: Path, method: str, url: str) -> list[dict[str, Any]]:
    from headway.cli.fleet import ask

    return ask(str(path), method, url, timeout_s=120.0)


@contextmanager
def fleet(setup: Setup, *, own: int, num_joined: int, num_fronts: int = 1) -> Iterator[Joined]:
    ports = [free_port() for _ in range(num_fronts)]
    servers: list[LiveServer] = []
    model = str(setup.engine["model"])
    join = ",".join(f"127.0.0.1:{port}" for port in ports)
    keepers = [Keeper(f"joined{at}", model, join, setup.folder) for at in range(num_joined)]
    admin = setup.folder / f"admin{ports[0]}"
    try:
        for keeper in keepers:
            keeper.start()
        for at, port in enumerate(ports):
            options: dict[str, object] = {"replicas": own, "listen_engines": f"127.0.0.1:{port}", "max_queue_s": 1e6}
            options |= {"stall_s": setup.stall_s, "admin_socket": str(admin) if at == 0 else f"{admin}-{at}"}
            servers.append(LiveServer({**setup.engine, "threads": 1}, options, setup.folder / f"front{at}.log"))
        asks = bodies(setup.streams, setup.max_tokens, more=LARGE_KINDS)
        yield Joined(servers[0], admin, keepers, asks, servers[1:])
    finally:
        for server in servers:
            server.close()
        for keeper in keepers:
            keeper.close()


async def under_load(
    setup: Setup, name: str, pause_s: float, there: Joined, count: int, disturb: Callable[[], Awaitable[None]]
) -> Table:
    """Clients ask without pause until the disturbance is over; every answer must be that of an undisturbed run."""
    await there.until(count)
    there.golden = [await there.server.ask(body) for body in there.asks]
    assert all(each.is_complete for each in there.golden), "the undisturbed run is not complete"
    got: list[tuple[int, Got]] = []
    is_over, turn = False, 0

    async def client() -> None:
        nonlocal turn
        while not is_over:
            index, turn = turn % len(there.asks), turn + 1
            asked = time.monotonic()
            got.append((index, await there.server.ask_again(there.asks[index])))
            await asyncio.sleep(min(5.0, time.monotonic() - asked))  # half of its time: half of the load

    running = [asyncio.create_task(client()) for _ in range(setup.neighbours)]
    began = time.monotonic()
    try:
        await disturb()
    finally:
        is_over = True
        await asyncio.gather(*running)
    return report(setup, name, pause_s, there, got, time.monotonic() - began)


def report(
    setup: Setup, name: str, pause_s: float, there: Joined, got: Sequence[tuple[int, Got]], took_s: float
) -> Table:
    table = Table(f"{name}, {setup.neighbours} clients", COLUMNS)
    num_right = sum(same(there.golden[index], answer) for index, answer in got)
    longest_s = max((answer.longest_gap_s for _, answer in got), default=0.0)
    errors = sum(answer.error is not None for _, answer in got)
    refused = sum(answer.num_refused > 0 for _, answer in got)
    cut = sum(answer.status == 200 and not answer.is_done for _, answer in got)
    ended = sum(keeper.num_ended for keeper in there.keepers)
    checks = {"not all the same": num_right == len(got) > 0, "paused too long": longest_s <= pause_s * setup.back_s}
    checks |= {"errors": errors == 0, "refused": refused == 0}
    table.add(name.split(",")[0], [len(got), num_right, errors, refused, cut, longest_s, ended, took_s], checks)
    return table


async def kill(setup: Setup, name: str = "SIGKILL", pause_s: float = 2.0) -> Table:
    rng, sig = random.Random(2), signal.Signals[name]
    with fleet(setup, own=1, num_joined=2) as there:

        async def disturb() -> None:
            for _ in range(setup.kills):
                rows = await there.until(3)
                await asyncio.sleep(rng.uniform(0.2, 1.2))
                pid = int(rng.choice(rows)["pid"])
                os.kill(pid, sig)
                if sig == signal.SIGSTOP and pid in [keeper.pid for keeper in there.keepers]:
                    await there.until(2)
                    os.kill(pid, signal.SIGCONT)
                while (
                    any(row["pid"] == pid and row["is_up"] for row in await there.replicas()) and sig != signal.SIGSTOP
                ):
                    await asyncio.sleep(0.02)
            await there.until(3)

        return await under_load(
            setup, f"{setup.kills} x {name}, 1 own and 2 joined engines", pause_s, there, 3, disturb
        )


async def stop(setup: Setup) -> Table:
    return await kill(setup, "SIGSTOP", 5.0)


async def roll(setup: Setup) -> Table:
    took: list[float] = []
    with fleet(setup, own=1, num_joined=2) as there:

        async def disturb() -> None:
            for keeper in there.keepers:
                os.kill(keeper.pid, signal.SIGTERM)
                await there.until(2)
                await there.until(3)
            late = Keeper("late", str(setup.engine["model"]), there.keepers[0].join, setup.folder)
            late.start()
            there.keepers.append(late)
            rows = await there.until(4)
            assert late.name in [row["name"] for row in rows]
            log = setup.folder / "late.log"
            while "joined the front" not in log.read_text():
                await asyncio.sleep(0.01)
            began = time.monotonic()
            while not any(row["name"] == "late" and row["requests"] for row in await there.replicas()):
                assert time.monotonic() - began < 30, "it gets no requests"
                await asyncio.sleep(0.01)
            took.append(time.monotonic() - began)
            there.keepers.remove(late)
            await asyncio.to_thread(_admin, there.admin, "POST", "/replicas/late/drain")
            assert late.process is not None
            assert await asyncio.to_thread(late.process.wait, 30) == 0
            await asyncio.to_thread(_admin, there.admin, "POST", "/restart")
            await there.until(3)

        table = await under_load(setup, "rolling restart and hot add and remove", 2.0, there, 3, disturb)
    if took[0] > 1.0:
        table.faults.append(f"a new engine got its first request after {took[0]:.2f} s")
    print(f"a new engine had requests {took[0]:.3f} s after it joined", file=sys.stderr)
    return table


async def poison(setup: Setup) -> Table:
    with fleet(setup, own=0, num_joined=3) as there:
        bad: list[Got] = []

        async def disturb() -> None:
            await asyncio.sleep(0.5)
            body = {**there.asks[0], "max_tokens": 16, "speculation": "off", "logit_bias": bias_for("crash")}
            asking = asyncio.create_task(there.server.ask(body))
            while not asking.done():
                for keeper in there.keepers:
                    keeper.revive()
                await asyncio.sleep(0.02)
            bad.append(await asking)
            await there.until(3)

        table = await under_load(setup, "a request that crashes engines, 3 joined", 30.0, there, 3, disturb)
    num_ended = sum(keeper.num_ended for keeper in there.keepers)
    limit = 2 + (setup.neighbours + 1).bit_length()
    if num_ended > limit:
        table.faults.append(f"{num_ended} engines ended by one request; allowed: {limit}")
    if not bad[0].error:
        table.faults.append("the request that crashes engines did not fail")
    return table


async def fronts(setup: Setup) -> Table:
    with fleet(setup, own=0, num_joined=2, num_fronts=2) as there:
        two, got = there.others[0], list[tuple[int, Got]]()
        await there.until(2)
        await two.until_ready()
        there.golden = [await there.server.ask(body) for body in there.asks]
        is_over, turn = False, 0

        async def client(server: LiveServer) -> None:
            nonlocal turn
            while not is_over:
                index, turn = turn % len(there.asks), turn + 1
                answer = await server.ask_again(there.asks[index])
                if not answer.is_complete and server is not two:  # its front is gone: what a client does then
                    server, answer = two, await two.ask_again(there.asks[index])
                got.append((index, answer))

        running = [
            asyncio.create_task(client(server)) for server in (there.server, two) for _ in range(setup.neighbours // 2)
        ]
        began = time.monotonic()
        await asyncio.sleep(3.0)
        there.server.process.kill()
        await asyncio.sleep(6.0)
        is_over = True
        await asyncio.gather(*running)
        return report(setup, "one of two fronts killed", 4.0, there, got, time.monotonic() - began)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--back-s", type=float, default=1.0, help="times the promised pauses, for a busy machine")
    args = parser.parse_args(argv)
    tables = []
    parts = {"kill": kill, "stop": stop, "roll": roll, "poison": poison, "fronts": fronts}
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            kills = min(args.kills, 5) if part == "stop" else args.kills
            setup = Setup({"model": args.model}, Path(folder), 24, kills, args.clients, args.max_tokens, args.back_s)
            try:
                tables.append(asyncio.run(parts[part](setup)))
            except BaseException:
                for log in sorted(Path(folder).glob("*.log")):
                    print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
                raise
    faults = [fault for table in tables for fault in table.faults]
    for table in tables:
        print(table)
    print("\n" + ("\n".join(faults) if faults else "everything is as promised"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
