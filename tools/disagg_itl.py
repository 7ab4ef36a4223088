"""What streams notice of a flood of prompts where other engines compute them: ITL P99 with it and without.

    python tools/disagg_itl.py                    by a virtual clock: the production engine, loop and mover
    python tools/disagg_itl.py --real             two engine processes, one core each (needs two cores)

By the virtual clock a decode engine has 16 streams; prompts of 512 tokens come from a prefill engine that computes one
after the other without a pause, and each goes on here with its KV. Beside it the same flood on one engine for all.
Exits 1 if P99 under the flood exceeds 1.1 times P99 without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from headway.cluster.client import FleetClient
from headway.config import EngineConfig
from headway.control.costs import CostModel, CostWeights
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.scheduler import Scheduler
from headway.engine.arrivals import ArrivedBlock
from headway.engine.client import EngineInfo, Submit
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity
from headway.engine.metrics import EngineMetrics
from headway.engine.mover import BlockMover
from headway.engine.virtual import VirtualExecutor
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.work import Work, pairs_of

# About SmolLM2-135M on two cores: 25 ms for a step of 16 rows, 0.7 ms for a token of a prompt, 80 us to copy a block.
COSTS = CostWeights(base=6e-3, mixed=2e-4, tokens=7e-4, pairs=2e-8, decode=1.2e-3, context=2e-7, chunks=1e-4)
COPY_S, BLOCK, NUM_STREAMS, NUM_PROMPT, NUM_TOKENS = 80e-6, 16, 16, 512, 2000


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


class CopyingExecutor(VirtualExecutor):
    """A block that is written takes time too."""

    def write_block(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        self._clock.advance(COPY_S)


class ReadyPeer:
    """A peer that has everything at once: the worst case for the engine that fetches."""

    def __init__(self, block_bytes: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._data = bytes(block_bytes)
        self._arrivals: deque[ArrivedBlock] = deque()

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        self._arrivals += [ArrivedBlock(ticket, number, self._data) for number in range(len(keys))]

    def cancel(self, ticket: int) -> None:
        pass

    def take(self, most: int) -> list[ArrivedBlock]:
        return [self._arrivals.popleft() for _ in range(min(most, len(self._arrivals)))]

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def close(self) -> None:
        pass


def virtual_itl(flood: str) -> list[float]:
    """Times between tokens of the streams; `flood`: none, handed over, or here."""
    clock, costs, num_blocks = VirtualClock(), CostModel(COSTS), 4096
    metrics = EngineMetrics(clock)
    executor = CopyingExecutor(Capacity(num_blocks, BLOCK, 64), clock, costs, {})
    scheduler = Scheduler(KVLedger(num_blocks, BLOCK), Limits(64, 512), Policy(), sink=metrics, costs=costs)
    mover = BlockMover(scheduler, executor, peers=ReadyPeer(executor.block_bytes()), timer=clock.now)
    info = EngineInfo("virtual", 8192, 50_000, BLOCK, num_blocks, 64)
    engine = Engine(scheduler, executor, info, metrics, clock, max_waiting=1000, mover=mover)
    for id in range(NUM_STREAMS):
        engine.add(Submit(id, [id] * 64, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)))
    each_s = costs.step(Work(NUM_PROMPT, pairs_of(0, NUM_PROMPT), 0, 0, chunks=1))
    last, gaps, id, due = dict[int, float](), list[float](), NUM_STREAMS, 1.0
    while len(gaps) < NUM_STREAMS * (NUM_TOKENS - 200):
        while flood != "none" and clock.now() >= due:
            id, due = id + 1, due + each_s
            prompt, params = [(id * 7 + i) % 5000 for i in range(NUM_PROMPT)], SamplingParams(max_tokens=2)
            if flood == "handed over":
                more = {"num_prompt": NUM_PROMPT, "is_resumed": True, "fetch_from": "x"}
                engine.add(Submit(id, [*prompt, 1], params, **more))  # type: ignore[arg-type]
            else:
                engine.add(Submit(id, prompt, params))
        for got in engine.step().ids:
            if got < NUM_STREAMS:
                if got in last and clock.now() > 1.0:
                    gaps.append(clock.now() - last[got])
                last[got] = clock.now()
    assert flood != "handed over" or mover.tokens_from_peers >= (id - NUM_STREAMS - 2) * NUM_PROMPT
    return gaps


def run_virtual() -> bool:
    idle, handed, here = (p99(virtual_itl(flood)) for flood in ("none", "handed over", "here"))
    print(f"virtual clock: ITL P99 {idle * 1e3:.2f} ms without a flood, {handed * 1e3:.2f} ms with it", end=" ")
    print(f"({handed / idle:.3f}x); one engine for all: {here * 1e3:.2f} ms ({here / idle:.2f}x)")
    return handed <= 1.1 * idle


def pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


async def stream(client: FleetClient, id: int, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    async for _ in client.submit(Submit(id, [1000 + id] * 64, params)):
        pass


def gaps_of(log: Path, began: float, ended: float) -> list[float]:
    """Seconds between steps of an engine in which the streams got a token, by its own clock."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [event for event in events if event["event"] == "Stepped" and began <= event["now"] <= ended]
    return [b["now"] - a["now"] for a, b in pairwise(steps) if min(a["num_decode"], b["num_decode"]) >= 4]


async def flooding(client: FleetClient, first: int, num_tokens: int) -> None:
    for id in range(first, first + 10_000):
        prompt = [(id * 7919 + i * 31) % 40_000 for i in range(NUM_PROMPT)]
        async for _ in client.submit(Submit(id, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0))):
            pass


async def run_real(num_tokens: int, rounds: int, folder: Path) -> bool:
    how = {
        "threads": 1,
        "role": "prefill,decode",
        "kv_memory_gb": 1.0,
        "speculation": "off",
    }  # else rows verify as chunks
    config = EngineConfig.of(**how, step_log=str(folder / "log"))
    client = FleetClient.start(config, num_replicas=2, log_level="error")
    await client.connect()
    try:
        await client.ready()
        for core, replica in enumerate(client.replicas):
            pin(replica.engine.pid or 0, core)
        os.sched_setaffinity(0, {0})  # the front beside the prefill engine: what is measured is the decode engine
        await asyncio.gather(*(stream(client, id, 20) for id in range(1, 5)))
        ratios, id = [], 10
        for _ in range(rounds):
            found = []
            for num_more in (0, 1, 2):  # none; prompts that end with their first token; prompts that go on
                task = asyncio.create_task(flooding(client, 1_000_000 + 10_000 * id, num_more)) if num_more else None
                await asyncio.sleep(1.0)
                began = time.monotonic()
                await asyncio.gather(*(stream(client, id + at, num_tokens) for at in range(4)))
                found.append(p99(gaps_of(folder / "log.1", began, time.monotonic())) * 1e3)
                id += 4
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            idle, beside, flood = found
            ratios.append(flood / idle)
            print(
                f"real: ITL P99 {idle:.1f} ms without a flood, {flood:.1f} ms with it ({flood / idle:.3f}x);", end=" "
            )
            print(f"{beside:.1f} ms beside prompts that never reach the decode engine ({flood / beside:.3f}x)")
        stats = await client.stats()
        print(f"{stats.tokens_from_peers} tokens fetched, {stats.failed_loads} loads failed")
        return sorted(ratios)[len(ratios) // 2] <= 1.1
    finally:
        await client.close(1.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if not args.real:
        return 0 if run_virtual() else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if asyncio.run(run_real(args.tokens, args.rounds, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
