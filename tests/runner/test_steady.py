"""Inputs that are kept from step to step are those that would be built anew."""

from __future__ import annotations

from array import array
from random import Random

import numpy as np
import pytest

from headway.runner.inputs import StepInputs, build
from headway.runner.slots import Slots
from headway.runner.steady import SteadyInputs
from headway.values.params import SamplingParams
from headway.values.plan import Chunk, Grow, Join, Samples, StepPlan

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0)
COLUMNS = ("tokens", "positions", "slot_map", "row_of", "query_start", "context", "sample_index")


def _slots(num_rows: int = 6) -> Slots:
    return Slots(num_rows=num_rows, num_blocks=400, block_size=BLOCK, max_len=64, vocab_size=100)


def _join(slots: Slots, row: int, num_tokens: int, blocks: list[int]) -> None:
    """A row whose every token but the last has its KV, with one block too many."""
    table = tuple(blocks.pop() for _ in range(num_tokens // BLOCK + 2))
    tokens = tuple((row * 31 + i) % 100 for i in range(num_tokens))
    slots.join(Join(row, row, 0, tokens, 1, table, num_tokens - 1, GREEDY, 0, frozenset()))


def _assert_equal(kept: StepInputs, anew: StepInputs) -> None:
    assert kept.batch is not None
    assert anew.batch is not None
    for name in COLUMNS:
        mine, theirs = getattr(kept.batch, name), getattr(anew.batch, name)
        assert mine.dtype == theirs.dtype, name
        assert np.array_equal(mine, theirs), name
    width = anew.batch.tables.shape[1]
    assert kept.batch.tables.flags.c_contiguous
    assert np.array_equal(kept.batch.tables[:, :width], anew.batch.tables)
    for name in ("rows", "positions", "index"):
        assert np.array_equal(getattr(kept, name), getattr(anew, name)), name
    assert (kept.verifies, kept.computed, kept.failed) == ([], [], {})


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_equals_what_is_built_anew(seed: int) -> None:
    rng, slots = Random(seed), _slots()
    steady, blocks = SteadyInputs(slots), list(range(400))
    rng.shuffle(blocks)
    decode, joined = array("i"), set[int]()
    for step in range(60):
        if not joined or rng.random() < 0.2:  # rows come and go: a new object, as the scheduler makes one
            if joined and rng.random() < 0.5:
                slots.leave(gone := rng.choice(sorted(joined)))
                joined.discard(gone)
            row = rng.randrange(slots.num_rows)
            _join(slots, row, rng.randint(1, 20), blocks)
            joined.add(row)
            decode = array("i", rng.sample(sorted(joined), len(joined)))
        for row in decode:  # a table grows at its end, or a block in it is swapped for a copy
            needed = int(slots.length[row]) // BLOCK
            if needed >= slots.widest(np.array([row])) or rng.random() < 0.1:
                slots.grow(Grow(row, needed, (blocks.pop(),)))
        plan = StepPlan(step, decode)
        kept, anew = steady.build(plan), build(plan, slots)
        assert kept is not None
        _assert_equal(kept, anew)
        slots.advance(anew.rows, anew.positions, np.array([rng.randrange(100) for _ in decode]))


def test_whatever_needs_a_closer_look_is_left_to_it() -> None:
    slots = _slots()
    steady, blocks = SteadyInputs(slots), list(range(100))
    for row in (0, 1, 2):
        _join(slots, row, 5, blocks)
    assert steady.build(StepPlan(0, array("i"))) is None
    assert steady.build(StepPlan(0, array("i", [0]), [Chunk(1, 0, 1, Samples.TOKEN)])) is None
    for odd in ([0, 6], [-1, 0], [0, 3]):
        assert steady.build(StepPlan(0, array("i", odd))) is None
    decode = array("i", [0, 1, 2])
    assert steady.build(StepPlan(0, decode)) is not None
    slots.fail(1, "broken")
    assert steady.build(StepPlan(1, decode)) is None
    _join(slots, 1, 9, blocks)
    inputs = steady.build(StepPlan(2, decode))
    assert inputs is not None
    _assert_equal(inputs, build(StepPlan(2, decode), slots))
    slots.length[2] -= 1  # a token that is known and was not computed
    assert steady.build(StepPlan(3, decode)) is None


def test_a_row_without_room_for_its_next_token_is_left_to_a_closer_look() -> None:
    slots = _slots()
    steady = SteadyInputs(slots)
    slots.join(Join(0, 0, 0, (1, 2, 3, 4, 5), 1, (7,), 4, GREEDY, 0, frozenset()))
    decode = array("i", [0])
    assert steady.build(StepPlan(0, decode)) is None
    slots.grow(Grow(0, 1, (9,)))
    assert steady.build(StepPlan(1, decode)) is not None
