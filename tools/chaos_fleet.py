"""Engines of a fleet are killed one after the other under load; every answer must be complete and the right one.

`kills` times a replica is chosen at random and killed, or stopped, while clients ask without pause at about half of
what the fleet can take. Every answer is compared with that of an undisturbed run. Prints a table and exits 1 if an
answer is lost, doubled, cut or another one, or if a stream paused for longer than promised.

    .venv/bin/python tools/chaos_fleet.py                       # the bundled model, three replicas, 20 kills
    .venv/bin/python tools/chaos_fleet.py --signal SIGSTOP --kills 5
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos import Setup, Table, settled_blocks
from chaos_client import LARGE_KINDS, Got, LiveServer, bodies, same

PAUSE_S = {"SIGKILL": 2.0, "SIGSTOP": 5.0}


async def num_up(server: LiveServer) -> int:
    """Replicas that are up."""
    return (await server.get("/metrics"))[2].count(b"\nheadway_replica_requests{")


async def run_fleet(setup: Setup, *, replicas: int, clients: int, name: str, pause_s: float) -> Table:
    """Kill engines while clients ask one thing after the other."""
    asks = bodies(setup.streams, setup.max_tokens, more=LARGE_KINDS)
    table = Table(
        f"{setup.kills} times {name} of one of {replicas} engines, {clients} clients",
        ("answers", "same", "errors", "refused", "cut", "longest pause s", "seconds"),
    )
    rng, is_over, turn = random.Random(1), False, 0
    got: list[tuple[int, Got]] = []
    with setup.serving(replicas=replicas) as server:
        golden = [await server.ask(body) for body in asks]
        assert all(each.is_complete for each in golden), "the undisturbed run is not complete"

        async def client() -> None:
            nonlocal turn
            while not is_over:
                index, turn = turn % len(asks), turn + 1
                got.append((index, await server.ask_again(asks[index])))

        running = [asyncio.create_task(client()) for _ in range(clients)]
        began = time.monotonic()
        for _ in range(setup.kills):
            while await num_up(server) < replicas:
                await asyncio.sleep(0.05)
            there = server.engines()
            await asyncio.sleep(rng.uniform(0.2, 1.2))
            os.kill(rng.choice(there), signal.Signals[name])
            while server.engines() == there:
                await asyncio.sleep(0.02)
        is_over = True
        await asyncio.gather(*running)
        took_s = time.monotonic() - began
        free, total = await settled_blocks(server)
    num_right = sum(same(golden[index], answer) for index, answer in got)
    longest_s = max(answer.longest_gap_s for _, answer in got)
    checks = {
        "not all the same": num_right == len(got) > 0,
        "paused too long": longest_s <= pause_s * setup.back_s,
        "blocks leaked": free == total,
    }
    errors = sum(answer.error is not None for _, answer in got)
    refused = sum(answer.num_refused > 0 for _, answer in got)
    cut = sum(answer.status == 200 and not answer.is_done for _, answer in got)
    table.add(name, [len(got), num_right, errors, refused, cut, longest_s, took_s], checks)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--signal", choices=list(PAUSE_S), default="SIGKILL")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup({"model": args.model}, Path(folder), 40, args.kills, max_tokens=args.max_tokens)
        work = run_fleet(
            setup, replicas=args.replicas, clients=args.clients, name=args.signal, pause_s=PAUSE_S[args.signal]
        )
        table = asyncio.run(work)
    print(table)
    print("\n" + ("\n".join(table.faults) if table.faults else "everything is as promised"))
    return 1 if table.faults else 0


if __name__ == "__main__":
    sys.exit(main())
