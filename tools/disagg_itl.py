"""What streams notice of a flood of prompts where other engines compute them: ITL P99 with it and without.

    python tools/disagg_itl.py                    by a virtual clock: the production engine, loop and mover
    python tools/disagg_itl.py --real             two engine processes, one core each (needs two cores)

By the virtual clock a decode engine has 16 streams; prompts of 512 tokens come from a prefill engine that computes one
after the other without a pause, and each goes on here with its KV. Beside it the same flood on one engine for all.
Exits 1 if P99 under the flood exceeds 1.1 times P99 without it.

In processes, in turns: the other core idle (`alone`); a process that has nothing to do with them and computes the same
prompts there (`control`); the prefill engine, whose prompts end with their first token (`kept`) or go on in the decode
engine (`handed over`). What the control does to the decode engine is the machine's: cores that share a cache,
memory and a host. Exits 1 if P99 with prompts handed over exceeds 1.1 times both that of `alone` and that of `control`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

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
from headway.llm import LLM
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.work import Work, pairs_of

# About SmolLM2-135M on two cores: 25 ms for a step of 16 rows, 0.7 ms for a token of a prompt, 80 us to copy a block.
COSTS = CostWeights(base=6e-3, mixed=2e-4, tokens=7e-4, pairs=2e-8, decode=1.2e-3, context=2e-7, chunks=1e-4)
# Without guesses: rows that verify them are chunks.
ENGINE: dict[str, Any] = {"threads": 1, "kv_memory_gb": 1.0, "speculation": "off"}
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


def gaps_of(log: Path, began: float, ended: float, num_streams: int) -> list[float]:
    """Seconds between steps of an engine in which all streams got a token, by its own clock."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [event for event in events if event["event"] == "Stepped" and began <= event["now"] <= ended]
    return [b["now"] - a["now"] for a, b in pairwise(steps) if min(a["num_decode"], b["num_decode"]) >= num_streams]


async def flooding(client: FleetClient, first: int, num_tokens: int) -> None:
    for id in range(first, first + 10_000):
        submit = Submit(id, flood_prompt(id), SamplingParams(max_tokens=num_tokens, temperature=0.0))
        async for _ in client.submit(submit):
            pass


def flood_prompt(id: int) -> list[int]:
    return [(id * 7919 + i * 31) % 40_000 for i in range(NUM_PROMPT)]


class FloodAlone:
    """The control: another process that computes the same prompts on the prefill engine's core, with nothing between.

    It runs from `on` to `off`, and has its memory and its model to itself.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, "--flood-alone"], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has computed a prompt
        self.off()

    def on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def off(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def flood_alone() -> None:
    """What that process does until it is killed."""
    os.sched_setaffinity(0, {0})
    llm = LLM(config=EngineConfig.of(**ENGINE))
    for id in count():
        llm.generate(flood_prompt(id), SamplingParams(max_tokens=1, temperature=0.0))
        print(id, flush=True) if id == 0 else None


LEGS = ("alone", "control", "kept", "handed over")


async def leg(client: FleetClient, control: FloodAlone, name: str, id: int, args: argparse.Namespace) -> list[float]:
    """Gaps between steps of the decode engine while the prefill engine's core does this."""
    task: asyncio.Task[None] | None = None
    if name == "control":
        control.on()
    elif name != "alone":
        task = asyncio.create_task(flooding(client, 1_000_000 + 10_000 * id, 1 if name == "kept" else 2))
    await asyncio.sleep(0.7)
    began = time.monotonic()
    await asyncio.gather(*(stream(client, id + at, args.tokens) for at in range(args.streams)))
    ended = time.monotonic()
    control.off()
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return gaps_of(args.folder / "log.1", began, ended, args.streams)


async def run_real(args: argparse.Namespace) -> bool:
    config = EngineConfig.of(**ENGINE, role="prefill,decode", touch_kv=args.touch, step_log=str(args.folder / "log"))
    client, control = FleetClient.start(config, num_replicas=2, log_level="error"), FloodAlone()
    await client.connect()
    try:
        await client.ready()
        for core, replica in enumerate(client.replicas):
            pin(replica.engine.pid or 0, core)
        os.sched_setaffinity(0, {0})  # the front beside the prefill engine: what is measured is the decode engine
        await asyncio.gather(*(stream(client, id, 20) for id in range(1, 1 + args.streams)))
        found: dict[str, list[list[float]]] = {name: [] for name in LEGS}
        for turn in range(args.rounds):
            for at in range(len(LEGS)):  # each is first, second, third and last as often
                name = LEGS[(at + turn) % len(LEGS)]
                id = 100 * (turn * len(LEGS) + at + 1)
                found[name].append(await leg(client, control, name, id, args))
            told = (f"{name} {p99(found[name][-1]) * 1e3:.2f}" for name in LEGS)
            print(f"round {turn + 1}: ITL P99 in ms: {', '.join(told)}", flush=True)
        stats = await client.stats()
        print(f"{stats.tokens_from_peers} tokens fetched, {stats.failed_loads} loads failed")
        return report(found)
    finally:
        control.close()
        await client.close(1.0)


def report(found: dict[str, list[list[float]]]) -> bool:
    """Medians over rounds; True if the handoff costs no more than allowed beside the control."""
    for name in LEGS:
        gaps = [gap * 1e3 for each in found[name] for gap in each]
        print(f"{name:11}: ITL {median(gaps):.2f} ms, P99 {p99(gaps):.2f} ms of {len(gaps)} gaps")
    ratios = dict[str, float]()
    for one, other in (("handed over", "alone"), ("control", "alone"), ("handed over", "control"), ("kept", "control")):
        each = [p99(a) / p99(b) for a, b in zip(found[one], found[other], strict=True)]
        ratios[f"{one} / {other}"] = median(each)
        print(f"P99 {one} / {other}: median {median(each):.3f} of {', '.join(f'{ratio:.2f}' for ratio in each)}")
    return min(ratios["handed over / alone"], ratios["handed over / control"]) <= 1.1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--touch", action="store_true", help="pools whose memory is taken at the start")
    parser.add_argument("--flood-alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.flood_alone:
        flood_alone()
    if not args.real:
        return 0 if run_virtual() else 1
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        return 0 if asyncio.run(run_real(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
