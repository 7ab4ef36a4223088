"""A step in which something raises: the row at fault fails, the others get the tokens they would have had."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headway.models.batch import ForwardBatch
from headway.runner.contain import halves, parts_of, plan_of
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Samples, StepPlan
from runner_kit import GREEDY, VOCAB, Desk, PrefixHashModel, oracle

T, N = Samples.TOKEN, Samples.NONE
SEEDED = SamplingParams(temperature=1.0)


class Touchy(PrefixHashModel):
    """Raises if any of these tokens is computed; `num_faults` times, or for ever."""

    def __init__(self, *tokens: int, num_faults: int = 10**9) -> None:
        super().__init__()
        self._tokens = set(tokens)
        self._left = num_faults
        self.num_forwards = 0

    def forward(self, batch: ForwardBatch, kv: np.ndarray) -> np.ndarray:
        self.num_forwards += 1
        if self._left and self._tokens.intersection(batch.tokens.tolist()):
            self._left -= 1
            raise RuntimeError("touched")
        return super().forward(batch, kv)


@pytest.mark.parametrize("culprits", [(), (0,), (2,), (3,), (0, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_only_the_rows_that_raise_fail(culprits: tuple[int, ...], params: SamplingParams) -> None:
    model = Touchy(13)
    desk = Desk(model=model)
    prompts = [(13 if row in culprits else 14, 5 + row) for row in range(4)]
    joins = [desk.join(row, prompt, params) for row, prompt in enumerate(prompts)]
    result = desk.step(chunks=[Chunk(row, 0, 2, T) for row in range(4)], joins=joins)
    assert set(result.failed) == set(culprits)
    answers = {row: [result.tokens[row]] for row in range(4) if row not in culprits}
    assert model.num_forwards <= 1 + 2 * len(culprits) * 2 + 1
    rows = list(answers)
    for _ in range(4) if rows else ():
        result = desk.step(rows, leaves=culprits)
        for row, token in zip(rows, result.tokens, strict=True):
            answers[row].append(token)
    for row, tokens in answers.items():
        assert tokens == oracle(prompts[row], params, joins[row].seed, frozenset(), 5)
    desk.executor.close()


def test_a_fault_that_does_not_come_again_fails_nothing_and_mixes_nothing_up() -> None:
    desk = Desk(model=Touchy(*range(VOCAB), num_faults=1))
    joins = [desk.join(row, (20 + row, 3)) for row in range(4)]
    # Forks come before other prompts in the plan and after them in a part.
    chunks = [Chunk(2, 0, 2, T), Chunk(0, 0, 2, T), Chunk(1, 0, 1, N), Chunk(3, 2, 0, T, source=2)]
    joins[3] = desk.join(3, (22, 3), SEEDED)
    result = desk.step(chunks=chunks, joins=joins)
    assert not result.failed
    expected = [oracle((22, 3), GREEDY, joins[2].seed, frozenset(), 1), oracle((20, 3), GREEDY, 0, frozenset(), 1)]
    expected.append(oracle((22, 3), SEEDED, joins[3].seed, frozenset(), 1))
    assert [[token] for token in result.tokens] == expected
    desk.executor.close()


def test_a_fork_fails_with_the_row_it_samples_from() -> None:
    desk = Desk(model=Touchy(13))
    joins = [desk.join(0, (13, 3)), desk.join(1, (13, 3)), desk.join(2, (14, 3))]
    chunks = [Chunk(0, 0, 2, T), Chunk(1, 2, 0, T, source=0), Chunk(2, 0, 2, T)]
    result = desk.step(chunks=chunks, joins=joins)
    assert set(result.failed) == {0, 1}
    assert result.tokens[2:] == oracle((14, 3), GREEDY, 0, frozenset(), 1)
    desk.executor.close()


def test_parts_make_the_plan_again() -> None:
    draw = random.Random(1)
    for _ in range(200):
        rows = draw.sample(range(20), 12)
        decode, sources, forks = rows[:5], rows[5:8], rows[8:]
        chunks = [Chunk(row, 0, 3, T) for row in sources]
        chunks += [Chunk(row, 3, 0, T, source=draw.choice(sources + decode)) for row in forks]
        draw.shuffle(chunks)
        plan = StepPlan(1, decode, chunks)  # type: ignore[arg-type]
        parts = parts_of(plan, set())
        made = plan_of(plan, parts)
        assert list(made.decode) == decode
        assert sorted(made.chunks, key=lambda chunk: chunk.row) == sorted(chunks, key=lambda chunk: chunk.row)
        first, second = halves(parts)
        assert [*first, *second] == parts
        assert first
        done = {decode[0]}
        assert all(decode[0] not in part.rows for part in parts_of(plan, done))
