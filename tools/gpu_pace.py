"""What a target between tokens costs on an H200, without one: the scheduler that serves over times that were measured.

    python tools/gpu_pace.py --workload FILE --rows 128 --target 14

llama-3.1-8b in bfloat16. The time of a step is a sum whose weights were fitted to 5,800 steps of the closed loop of
`headway.bench.device_open` with 128 slots, without a target and with 14 and 15 ms, and noise as large as the error of
that sum in steps with chunks. Closed loop without and with the target, then an open loop at 80 % of the first; with
steps that end where the target does, and with steps that have the sizes to which the device pads them.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.bench.device_open import lengthen, quantile
from headway.bench.workload import WorkItem
from headway.build import build_scheduler
from headway.config import EngineConfig
from headway.engine.client import EngineInfo, Submit
from headway.engine.engine import Engine
from headway.engine.executor import Capacity, Late
from headway.engine.metrics import EngineMetrics
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan, StepResult
from headway.values.work import pairs_of

SIZES = (64, *range(96, 448, 32), 480, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
DECODE = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 1025, 32))
BLOCKS, TOKENS = 32_000, 4096
NOISE = 0.5  # ms


@dataclass(slots=True)
class VirtualTime:
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds


class SimulatedDevice:
    """Steps take what the formula says, one after the other; nothing is computed."""

    def __init__(self, clock: VirtualTime, rows: int) -> None:
        self._clock, self._rows, self._rng = clock, rows, random.Random(3)
        self._length = [0] * rows
        self._queue: deque[tuple[StepPlan, float, float]] = deque()
        self._end = 0.0

    def capacity(self) -> Capacity:
        return Capacity(BLOCKS, 16, self._rows, 0)

    def supply(self, plan_id: int, late: Late) -> None:
        """Nothing ever comes late."""

    def close(self) -> None:
        """There is nothing to close."""

    def submit(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._length[join.row] = join.start
        for row in plan.decode:
            self._length[row] += 1
        cells = sum(self._length[row] for row in plan.decode)
        num = pairs = 0
        for chunk in plan.chunks:
            self._length[chunk.row] = chunk.start + chunk.count
            num += chunk.count
            pairs += pairs_of(chunk.start, chunk.count)
        sizes = SIZES if plan.chunks else DECODE
        size = sizes[bisect_left(sizes, max(1, len(plan.decode) + num))]
        ms = 4.45 + 0.008 * size + 3.4e-5 * cells
        if plan.chunks:
            ms = 3.33 + 0.019 * size + 3.3e-5 * cells + 2.55e-6 * pairs + 0.11 * len(plan.chunks)
            ms = max(ms + self._rng.gauss(0, NOISE), 1.0)
        self._queue.append((plan, ms * 1e-3, self._clock.seconds))

    def collect(self) -> StepResult:
        plan, seconds, submitted = self._queue.popleft()
        self._end = max(self._end, submitted) + seconds
        self._clock.seconds = max(self._clock.seconds, self._end)
        return StepResult(plan.id, [5] * len(plan.sampling_rows()), elapsed=seconds)


def make(rows: int, target: float | None, step_sizes: Sequence[int] = ()) -> tuple[Engine, VirtualTime]:
    clock = VirtualTime()
    config = EngineConfig.of(
        num_blocks=BLOCKS,
        prefix_caching=False,
        max_num_seqs=rows,
        max_num_batched_tokens=TOKENS,
        max_waiting=1 << 20,
        depth=2,
        target_itl_ms=target,
    )
    metrics = EngineMetrics(clock, None)
    info = EngineInfo("simulated", 8192, 128_256, 16, BLOCKS, rows)
    device = SimulatedDevice(clock, rows)
    scheduler = build_scheduler(config, BLOCKS, metrics, 0, step_sizes=step_sizes)
    return Engine(scheduler, device, info, metrics, clock, depth=2, max_waiting=1 << 20), clock


def serve(engine: Engine, clock: VirtualTime, works: Sequence[WorkItem], due: Sequence[float]) -> tuple[str, float]:
    """ITLs and first tokens in words, and the seconds that it took."""
    last: dict[int, float] = {}
    itls: list[float] = []
    short: list[float] = []
    following, settled = 0, len(works) // 5
    while following < len(works) or engine.has_work:
        if not engine.has_work:
            clock.seconds = max(clock.seconds, due[following])
        while following < len(works) and due[following] <= clock.seconds:
            work = works[following]
            params = SamplingParams(max_tokens=work.max_tokens, temperature=1.0, ignore_eos=True)
            engine.add(Submit(following, work.tokens, params, seed=1))
            following += 1
        for id in engine.step().ids:
            if id in last:
                itls.append(clock.seconds - last[id])
            elif id % 10 and id >= settled:
                short.append(clock.seconds - due[id])
            last[id] = clock.seconds
    p50, p99 = (quantile(itls, share) * 1e3 for share in (0.5, 0.99))
    first = quantile(short, 0.5) * 1e3
    return f"ITL P50 {p50:.1f}, P99 {p99:.1f} ms, {p99 / p50:.2f}; first token {first:.0f} ms", clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--target", type=float, default=14.0)
    args = parser.parse_args()
    lines = args.workload.read_text().splitlines()[: args.requests]
    works = lengthen([WorkItem(entry["tokens"], entry["max_tokens"]) for entry in map(json.loads, lines)])
    _, seconds = serve(*make(args.rows, None), works, [0.0] * len(works))
    most = len(works) / seconds
    rng, due, at = random.Random(1), [], 0.0
    for _ in works:
        at += rng.expovariate(0.8 * most)
        due.append(at)
    for name, sizes in (("steps end at the target", ()), ("steps have the device's sizes", SIZES)):
        _, seconds = serve(*make(args.rows, args.target, sizes), works, [0.0] * len(works))
        seen, _ = serve(*make(args.rows, args.target, sizes), works, due)
        rate = len(works) / seconds
        print(f"{name}: {most:.1f} and {rate:.1f} requests/s, {1 - rate / most:.1%} lost; at 80 %: {seen}", flush=True)


if __name__ == "__main__":
    main()
