"""The exactness matrix: one row's tokens and logits must not depend on other rows of its batch or on its history.

A cell is (company, chunk, cache, preemption, depth), run under some `Rules`. Tokens are compared with a reference;
logits bit for bit between all cells: a digest is kept per token prefix, and the same prefix must give the same digest
everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from exactness_rules import PLAIN, Rules, give_costs, submits
from headway.backends.cpu import LoadedCpu
from headway.bench.recorder import LogitRecorder
from headway.bench.reference import Reference
from headway.build import build_engine
from headway.config import CacheConfig, EngineConfig, SchedulerConfig
from headway.core.preemption import preempt
from headway.engine.client import Stats
from headway.engine.engine import Engine
from headway.runner.memory import GIB, block_bytes

PLENTY = 1200  # blocks: memory never runs out
BLOCK_SIZE = 16
SECOND_WAVE = 6  # the step before which the second wave arrives


@dataclass(frozen=True, slots=True)
class Cell:
    company: int  # other requests in every batch
    chunk: int | None
    cache: bool  # a second pass over the same prompts, which then hits
    preempts: bool
    depth: int

    def __str__(self) -> str:
        return (
            f"company {self.company:2}  chunk {self.chunk or 'all':>3}  cache {'hit' if self.cache else 'off'}  "
            f"preempt {'yes' if self.preempts else 'no ':3}  depth {self.depth}"
        )


def all_cells(company: int = 16) -> Iterator[Cell]:
    for parts in itertools.product((0, company), (16, 64, None), (False, True), (False, True), (1, 2)):
        yield Cell(*parts)


def covering_cells(company: int = 16) -> list[Cell]:
    """Six cells with company in which any two settings of different factors meet."""
    whole, yes, no = None, True, False
    parts = ((16, no, no, 1), (16, yes, yes, 2), (64, no, yes, 1), (64, yes, no, 2), (whole, no, no, 2))
    return [Cell(company, *part) for part in (*parts, (whole, yes, yes, 1))]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a cell."""

    answers: list[list[int]]
    recorder: LogitRecorder
    stats: Stats
    is_reordered: bool  # in some pass the requests were not admitted in order of arrival


def run_cell(
    cell: Cell,
    loaded: LoadedCpu,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    digests: dict[bytes, bytes],
    fillers: Sequence[Sequence[int]] = (),
    rules: Rules = PLAIN,
) -> Outcome:
    """The greedy answers of this cell and what happened in the run."""
    recorder = LogitRecorder(loaded.decoder, digests)
    requests = [*prompts, *fillers[: cell.company]]
    config = _config(cell, rules, loaded, requests, max_tokens)
    engine = build_engine(config, replace(loaded, decoder=recorder), keeps_tokens=True)
    recorder.watch(engine)
    if rules.has_intents:
        give_costs(engine, rules)
    is_reordered = False
    try:
        for _ in range(2 if cell.cache else 1):
            if cell.company:
                recorder.admitted.clear()
                answers = _drive(engine, requests, max_tokens, cell, rules)[: len(prompts)]
                is_reordered |= recorder.admitted != [item.id for item in submits(requests, max_tokens, rules)]
            else:
                answers = [_drive(engine, [prompt], max_tokens, cell, rules)[0] for prompt in prompts]
        if cell.cache and not rules.is_short:  # with too little memory a second pass finds the first one evicted
            assert engine.stats().tokens_cached > 0
        assert not recorder.num_wrong_picks
        return Outcome(answers, recorder, engine.stats(), is_reordered)
    finally:
        engine.close()


def blocks_needed(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Blocks of all of them together at their ends."""
    return sum(-(-(len(prompt) + max_tokens - 1) // BLOCK_SIZE) for prompt in prompts)


def _config(
    cell: Cell, rules: Rules, loaded: LoadedCpu, requests: Sequence[Sequence[int]], max_tokens: int
) -> EngineConfig:
    need, spec = blocks_needed(requests, max_tokens), loaded.spec
    each = block_bytes(
        layers=spec.layers, block_size=BLOCK_SIZE, kv_heads=spec.kv_heads, head_dim=spec.head_dim, kv_dtype="float32"
    )
    fields = dict(rules.fields) | ({"swap_space_gb": need * each / GIB} if rules.swaps else {})
    is_short = rules.is_short and cell.company  # one request alone needs all it needs
    return EngineConfig(
        cache=CacheConfig(
            block_size=BLOCK_SIZE, num_blocks=need // 2 if is_short else PLENTY, prefix_caching=cell.cache
        ),
        scheduler=SchedulerConfig(
            max_chunk_tokens=cell.chunk, depth=cell.depth, max_num_batched_tokens=1024, speculation="off", **fields
        ),
    )


def _drive(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, cell: Cell, rules: Rules
) -> list[list[int]]:
    coming = submits(prompts, max_tokens, rules)
    num_first = len(coming) if len(coming) == 1 or not rules.has_intents or rules.is_short else len(coming) // 2
    for item in coming[:num_first]:
        engine.add(item)
    answers: dict[int, list[int]] = {}
    for step in itertools.count():
        if step == SECOND_WAVE:
            for item in coming[num_first:]:
                engine.add(item)
        if not engine.has_work:
            return [answers[id] for id in range(len(prompts))]
        for output in engine.step().finished:
            assert output.error is None, output.error
            answers[output.id] = list(output.tokens)
        # Three times each, in prefill or later: for ever would keep a long prompt from ever being done.
        running = [req for req in engine.scheduler.state.rows.running() if req.num_preempted < 3]
        if cell.preempts and step % 7 == 3 and running:
            preempt(engine.scheduler.state, running[step // 7 % len(running)])
    raise AssertionError


def read_prompts() -> list[str]:
    """Twenty prompts of many kinds and lengths."""
    path = Path(__file__).parent / "data" / "prompts.txt"
    return [line.replace("\\n", "\n") for line in path.read_text(encoding="utf-8").splitlines()]


def reference(
    config: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The greedy answers of transformers' own model class over the same weights."""
    model = Reference(config, tensors.items())
    answers = []
    for prompt in prompts:
        answers.append(model.answer(prompt, max_tokens)[0])
        on_progress(len(answers))
    return answers


def filler_prompts(vocab: int, count: int = 16, seed: int = 5) -> list[list[int]]:
    """Company of uneven length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (5 + 13 * i % 90,), generator=generator).tolist() for i in range(1, count + 1)]
