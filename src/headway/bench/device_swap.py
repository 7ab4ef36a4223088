"""What copying a request's KV to host memory and back costs a CUDA device, beside computing it again.

    1. steps of decode rows that overlap (depth 2): what one that leaves, one that comes back, one that is computed add
    2. an engine with half the KV memory that its requests need: copying if that is cheaper, never, against plenty

Weights are made up. Run it by `python -m headway.bench.device_swap`: it needs torch, Triton and numpy, nothing else.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from headway.backends.cuda import DTYPES, open_device
from headway.bench.console import end
from headway.bench.device import answer, make_engine
from headway.bench.workload import WorkItem
from headway.engine.garbage import settle_garbage
from headway.kernels.cuda.launch import Launch
from headway.kernels.cuda.products import fix_order
from headway.models.shapes import shape_of
from headway.models.spec import ModelSpec
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.weights import dummy_weights
from headway.values.params import SamplingParams
from headway.values.plan import BlockCopy, BlockRef, Chunk, Join, Samples, StepPlan, Tier

_STEPS, _EVERY = 25, 3
_CONTEXT = 600  # of the decode rows
_GREEDY = SamplingParams(temperature=0.0)


class Added(NamedTuple):
    """Milliseconds that one request adds to steps."""

    leaving: float
    returning: float
    computing: float


class Steps:
    """Steps of so many decode rows, some of which move or compute one more request."""

    def __init__(self, executor: CudaExecutor, num_rows: int, num_tokens: int, seed: int = 0) -> None:
        self._executor, self._num_rows, self._next = executor, num_rows, 0
        capacity, rng = executor.capacity(), random.Random(seed)
        free = rng.sample(range(capacity.num_blocks), capacity.num_blocks)
        room = -(-(_CONTEXT + _STEPS + 2) // capacity.block_size)
        self._tables = [[free.pop() for _ in range(room)] for _ in range(num_rows)]
        table = [free.pop() for _ in range(-(-num_tokens // capacity.block_size))]
        hosts = rng.sample(range(capacity.host_blocks), len(table))
        pairs = [(BlockRef(Tier.DEVICE, a), BlockRef(Tier.HOST, b)) for a, b in zip(table, hosts, strict=True)]
        self._row = capacity.num_rows - 1
        join = Join(self._row, self._row, 0, [17] * num_tokens, num_tokens, table, 0, _GREEDY, 0, frozenset())
        self._kinds: Mapping[str, dict[str, object]] = {
            "plain": {},
            "leaving": {"copies": [BlockCopy(a, b) for a, b in pairs]},
            "returning": {"copies": [BlockCopy(b, a) for a, b in pairs]},
            "computing": {"joins": [join], "chunks": [Chunk(self._row, 0, num_tokens, Samples.TOKEN)]},
        }

    def seconds(self, kind: str) -> float:
        """Of all steps, every third of which is of that kind."""
        capacity = self._executor.capacity()
        tokens = [17] * (_CONTEXT + 1)
        joins = [
            Join(i, i, 0, tokens, 1, table, _CONTEXT, _GREEDY, i, frozenset()) for i, table in enumerate(self._tables)
        ]
        self._submit(array("i"), {"joins": joins, "leaves": [*range(capacity.num_rows)]})
        self._collect()
        torch.cuda.synchronize()
        rows = array("i", range(self._num_rows))
        began = time.perf_counter()
        for i in range(_STEPS):
            self._submit(rows, self._kinds[kind if i % _EVERY == 1 else "plain"])
            if i:
                self._collect()
        self._collect()
        seconds = time.perf_counter() - began
        torch.cuda.synchronize()
        return seconds

    def added(self) -> tuple[float, Added]:
        """Milliseconds of a plain step, and what the other kinds add to one."""
        for kind in self._kinds:
            self.seconds(kind)
        found = {kind: sorted(self.seconds(kind) for _ in range(5))[2] * 1e3 for kind in self._kinds}
        num = len(range(1, _STEPS, _EVERY))
        return found["plain"] / _STEPS, Added(*((found[kind] - found["plain"]) / num for kind in Added._fields))

    def _submit(self, rows: array[int], more: Mapping[str, object]) -> None:
        self._next += 1
        self._executor.submit(StepPlan(self._next, rows, **more))  # type: ignore[arg-type]

    def _collect(self) -> None:
        failed = self._executor.collect().failed
        assert not failed, failed


def run_engines(executor: CudaExecutor, spec: ModelSpec, sizes: Sizes, works: Sequence[WorkItem]) -> None:
    """Print how fast the same requests are with plenty of memory and with half of it, and whether answers agree."""
    half = replace(sizes, num_blocks=sizes.num_blocks // 2)
    cases = {
        "plenty": replace(sizes, host_blocks=0),
        "half, copied or computed again": half,
        "half, computed again": replace(half, host_blocks=0),
    }
    num = sum(work.max_tokens for work in works)
    wanted: dict[int, Sequence[int]] = {}
    for name, chosen in cases.items():
        for is_timed in (False, True):
            engine = make_engine(executor, spec, chosen, caching=False, target_itl_ms=None)
            settle_garbage()
            seconds, answers = answer(engine, works, 1.0)
            wanted = wanted or answers
            if is_timed:
                stats, costs = engine.stats(), engine.scheduler.state.costs
                blocks = 2 * -(-len(works[0].tokens) // sizes.block_size)
                print(
                    f"{name}: {num / seconds:,.0f} output tok/s, {stats.preemptions} preemptions, {stats.swaps} of "
                    f"them copied, {stats.tokens_recomputed} tokens computed again; "
                    f"{sum(answers[id] != wanted[id] for id in wanted)} of {len(works)} answers differ; learned for "
                    f"{len(works[0].tokens)} tokens: there and back {costs.copy(blocks) * 1e3:.2f} ms, computing "
                    f"{costs.prefill(len(works[0].tokens)) * 1e3:.2f} ms",
                    flush=True,
                )


def run(args: argparse.Namespace) -> None:
    device, spec = open_device(), shape_of(args.shape)
    fix_order()
    weights = dummy_weights(spec, dtype=DTYPES[args.dtype], device=device.device)
    blocks = args.requests * -(-(args.tokens + args.output) // 16) + args.requests
    host = -(-args.tokens // 16) * args.requests
    sizes = Sizes(args.requests + 1, blocks, 4096, 4096, host_blocks=host)
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 40_000) for _ in range(args.tokens)] for _ in range(args.requests)]
    works = [WorkItem(prompt, args.output) for prompt in prompts]
    with torch.inference_mode():
        executor = make_executor(spec, weights, sizes, Launch(device.num_sms, device.has_dependent_launch))
        executor.fill_kv()
        for rows in (1, 32, args.requests):
            step, added = Steps(executor, rows, args.tokens).added()
            both = added.leaving + added.returning
            print(
                f"{args.tokens} tokens beside {rows} rows, whose step takes {step:.2f} ms: leaving adds "
                f"{added.leaving:.2f} ms, returning {added.returning:.2f}, computing {added.computing:.2f} = "
                f"{added.computing / added.returning:.1f} times returning, {added.computing / both:.1f} times both",
                flush=True,
            )
        run_engines(executor, spec, sizes, works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--tokens", type=int, default=600, help="of a prompt")
    parser.add_argument("--output", type=int, default=300)
    parser.add_argument("--requests", type=int, default=128)
    run(parser.parse_args())


if __name__ == "__main__":
    end(main)
