"""The exactness matrix on a device: other rows, chunks, cache hits, preemption, swap and overlap change no answer.

The cells are those of the CPU's matrix (tools/exactness.py), and some with far more other rows. The reference is the
device's own run of each prompt alone. Where one step is collected before the next is submitted, logits are compared
too: a checksum per token prefix, the same prefix must give the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from cuda_kit import DEVICE, IS_CUDA, LAUNCH
from exactness import Cell, _drive, all_cells, blocks_needed, filler_prompts
from exactness_rules import PLAIN, Rules, find_rules, give_costs
from headway.backends.cuda import DTYPES, KV_DTYPES
from headway.build import build_scheduler
from headway.config import EngineConfig
from headway.engine.client import EngineInfo, Stats
from headway.engine.clock import MonotonicClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity, Late
from headway.engine.metrics import EngineMetrics
from headway.kernels.cuda.products import fix_order
from headway.models.shapes import shape_of
from headway.runner.cuda.assemble import Sizes, make_executor
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.weights import dummy_weights
from headway.values.plan import StepPlan, StepResult

pytestmark = pytest.mark.skipif(not IS_CUDA, reason="bits of bfloat16 products are the device's own")

MAX_TOKENS = 20
SIZES = Sizes(num_rows=300, num_blocks=6000, max_len=2048, max_tokens=2048, host_blocks=600)
CELLS = [*all_cells(16), *(Cell(255, chunk, cache, True, 1) for chunk in (64, None) for cache in (False, True))]


class Watched:
    """Passes plans on and keeps a checksum of each watched row's logits under its token prefix."""

    def __init__(self, inner: CudaExecutor, num_watched: int) -> None:
        self.inner = inner
        self.num_watched = num_watched  # requests with ids below are watched
        self.is_on = True
        self.sums: dict[tuple[int, ...], int] = {}
        self.mismatches: list[int] = []
        self.num_seen = 0
        self._plans: list[StepPlan] = []
        self._rows: dict[int, tuple[int, list[int]]] = {}  # row -> request and its tokens
        logits = inner.graphs.step.decoder.logits
        self._weights = torch.randint(-(2**62), 2**62, (logits.shape[1],), device=DEVICE) | 1

    def capacity(self) -> Capacity:
        return self.inner.capacity()

    def submit(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._rows[join.row] = (join.id, list(join.tokens))
        self._plans.append(plan)
        self.inner.submit(plan)

    def supply(self, plan_id: int, late: Late) -> None:
        self.inner.supply(plan_id, late)

    def collect(self) -> StepResult:
        result = self.inner.collect()
        plan = self._plans.pop(0)
        rows = plan.sampling_rows()
        if self.is_on:
            self._compare(rows)
        for row, token in zip(rows, result.tokens, strict=True):
            self._rows[row][1].append(token)
        return result

    def close(self) -> None:
        """The executor outlives its engines."""

    def _compare(self, rows: Sequence[int]) -> None:
        mine = [i for i, row in enumerate(rows) if self._rows[row][0] < self.num_watched]
        logits = self.inner.graphs.step.decoder.logits[mine].view(torch.int16).long()
        for i, total in zip(mine, (logits * self._weights).sum(1).tolist(), strict=True):
            tokens = self._rows[rows[i]][1]
            self.num_seen += 1
            if self.sums.setdefault(tuple(tokens), total) != total:
                self.mismatches.append(len(tokens))


@pytest.fixture(
    scope="module", params=["llama-3.2-1b", "smollm2-135m", "smollm2-135m fp8 fp8", "smollm2-135m bfloat16 int8"]
)
def watched(request: pytest.FixtureRequest) -> Watched:
    fix_order()
    name, dtype, kv_dtype = [*request.param.split(), "bfloat16", "bfloat16"][:3]
    spec = replace(shape_of(name), max_len=SIZES.max_len)
    weights = dummy_weights(spec, dtype=DTYPES[dtype], device=DEVICE)
    return Watched(make_executor(spec, weights, replace(SIZES, kv_dtype=KV_DTYPES[kv_dtype]), LAUNCH), 0)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40_000, (num,), generator=generator).tolist() for num in (7, 33, 90, 300, 610)]


@pytest.fixture(scope="module")
def alone(watched: Watched, prompts: list[list[int]]) -> list[list[int]]:
    answers, _ = run(watched, Cell(0, None, False, False, 1), prompts)
    return answers


def run(watched: Watched, cell: Cell, prompts: list[list[int]], rules: Rules = PLAIN) -> tuple[list[list[int]], Stats]:
    requests = [*prompts, *filler_prompts(40_000, max(1, cell.company))[: cell.company]]
    need = blocks_needed(requests, MAX_TOKENS)
    num_blocks = need // 2 if rules.is_short and cell.company else SIZES.num_blocks
    host_blocks = SIZES.host_blocks if rules.swaps else 0
    config = EngineConfig.of(
        num_blocks=num_blocks,
        prefix_caching=cell.cache,
        max_num_seqs=SIZES.num_rows,
        max_num_batched_tokens=SIZES.max_tokens,
        max_chunk_tokens=cell.chunk,
        depth=cell.depth,
    )
    clock = MonotonicClock()
    metrics = EngineMetrics(clock, None)
    scheduler = build_scheduler(config, num_blocks, metrics, host_blocks)
    spec = watched.inner.graphs.step.decoder.spec
    info = EngineInfo("dummy", SIZES.max_len, spec.vocab_size, 16, num_blocks, SIZES.num_rows)
    watched.mismatches.clear()
    watched.is_on, watched.num_watched = cell.depth == 1, len(prompts) if cell.company else 1
    engine = Engine(scheduler, watched, info, metrics, clock, depth=cell.depth, keeps_tokens=True)
    if rules is not PLAIN:
        give_costs(engine, rules)
    for _ in range(2 if cell.cache else 1):
        if cell.company:
            answers = _drive(engine, requests, MAX_TOKENS, cell, rules)[: len(prompts)]
        else:
            answers = [_drive(engine, [prompt], MAX_TOKENS, cell, rules)[0] for prompt in prompts]
    stats = engine.stats()
    assert stats.blocks_free == num_blocks
    assert stats.tokens_cached > 0 or not cell.cache or rules.is_short
    return answers, stats


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_has_the_answers_and_logits_of_prompts_alone(
    watched: Watched, prompts: list[list[int]], alone: list[list[int]], cell: Cell
) -> None:
    seen = watched.num_seen
    answers, stats = run(watched, cell, prompts)
    assert answers == alone
    assert watched.mismatches == []
    assert watched.num_seen > seen or cell.depth > 1
    assert stats.preemptions > 0 or not cell.preempts


@pytest.mark.parametrize("name", ["half-recompute", "half-swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_half_the_memory_changes_no_answer(
    watched: Watched, prompts: list[list[int]], alone: list[list[int]], name: str, depth: int
) -> None:
    (rules,) = find_rules(name)
    answers, stats = run(watched, Cell(16, None, False, False, depth), prompts, rules)
    assert answers == alone
    assert watched.mismatches == []
    assert stats.preemptions > 0
    assert stats.swaps > 0 or not rules.swaps
