"""What a target between tokens costs on an H200, without one: the scheduler that serves over times that were measured.

    python tools/gpu_pace.py --workload FILE --rows 256 --target 28

llama-3.1-8b in bfloat16: products by their sustained times at the padded number of rows, KV at 4.2 TB/s, and prefill
attention by its longest program: a microsecond for each 16 cells, in every layer. Closed loop without and with the
target, then an open loop at 80 % of the first, for the buckets and the attention as they were and as they are.
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

from headway.bench.device import Curve
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

PRODUCTS = Curve(
    (1, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096),
    (4.20, 4.12, 4.19, 4.16, 4.99, 7.45, 9.57, 12.1, 18.7, 23.7, 46.3, 92.3),  # ms
)
COARSE = (64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
FINE = (64, *range(96, 513, 32), 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
DECODE = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 1025, 32))
BLOCKS, TOKENS, LAYERS, PROGRAMS, KV_HEADS = 32_000, 4096, 32, 264, 8


@dataclass(slots=True)
class VirtualTime:
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds


class SimulatedDevice:
    """Steps take what the formula says, one after the other; nothing is computed."""

    def __init__(self, clock: VirtualTime, rows: int, sizes: Sequence[int], parts: int) -> None:
        self._clock, self._rows, self._sizes, self._parts = clock, rows, sizes, parts
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
        deepest = tiles = num = 0.0
        for chunk in plan.chunks:
            end = self._length[chunk.row] = chunk.start + chunk.count
            num += chunk.count
            deepest = max(deepest, end / 16 / (self._parts if end > 1024 else 1))
            tiles += -(-chunk.count // 32) * end / 16 * KV_HEADS / PROGRAMS
        sizes = self._sizes if plan.chunks else DECODE
        size = sizes[bisect_left(sizes, max(1, len(plan.decode) + num))]
        ms = 0.95 * PRODUCTS(size) + cells * 131_072 / 4.2e9 + LAYERS * max(deepest, tiles) * 1e-3 + 0.4 + size * 1.2e-3
        self._queue.append((plan, ms * 1e-3, self._clock.seconds))

    def collect(self) -> StepResult:
        plan, seconds, submitted = self._queue.popleft()
        self._end = max(self._end, submitted) + seconds
        self._clock.seconds = max(self._clock.seconds, self._end)
        return StepResult(plan.id, [5] * len(plan.sampling_rows()), elapsed=seconds)


def make(rows: int, target: float | None, sizes: Sequence[int], parts: int) -> tuple[Engine, VirtualTime]:
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
    device = SimulatedDevice(clock, rows, sizes, parts)
    scheduler = build_scheduler(config, BLOCKS, metrics, 0)
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
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--target", type=float, default=28.0)
    args = parser.parse_args()
    lines = args.workload.read_text().splitlines()[: args.requests]
    works = lengthen([WorkItem(entry["tokens"], entry["max_tokens"]) for entry in map(json.loads, lines)])
    cases = (("coarse buckets", COARSE, 1), ("fine buckets", FINE, 1), ("and deep chunks cut", FINE, 8))
    for name, sizes, parts in cases:
        rates = []
        for target in (None, args.target):
            _, seconds = serve(*make(args.rows, target, sizes, parts), works, [0.0] * len(works))
            rates.append(len(works) / seconds)
        rng, due, at = random.Random(1), [], 0.0
        for _ in works:
            at += rng.expovariate(0.8 * rates[0])
            due.append(at)
        seen, _ = serve(*make(args.rows, args.target, sizes, parts), works, due)
        loss = 1 - rates[1] / rates[0]
        print(f"{name}: {rates[0]:.1f} and {rates[1]:.1f} requests/s, {loss:.1%} lost; at 80 %: {seen}", flush=True)


if __name__ == "__main__":
    main()
