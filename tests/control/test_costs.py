"""The cost model finds planted weights, holds on where steps say nothing, and shrugs off the odd step."""

from __future__ import annotations

import random

import pytest

from headway.control.costs import CostModel, Weights
from headway.control.pacer import FIRST, FLOOR, TargetPacer
from headway.core.costs import Costs
from headway.values.work import Work, pairs_of

TRUE = Weights(base=0.01, mixed=0.002, tokens=2e-4, pairs=3e-9, decode=1e-4, context=5e-7, chunks=1e-4, copies=1e-5)


def _works(count: int, seed: int = 1, *, is_mixed: bool = True) -> list[Work]:
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        decode = rng.randrange(1, 64)
        context = decode * rng.randrange(50, 500)
        if is_mixed and rng.random() < 0.5:
            tokens, start = rng.randrange(16, 512), rng.randrange(0, 1000)
            works.append(
                Work(tokens, pairs_of(start, tokens), decode, context, rng.randrange(1, 4), rng.randrange(0, 9))
            )
        else:
            works.append(Work(decode=decode, context=context))
    return works


def _taught(works: list[Work], noise: float = 0.0) -> CostModel:
    truth, model, rng = CostModel(TRUE), CostModel(), random.Random(2)
    for work in works:
        model.observe(work, truth.step(work) * (1 + noise * rng.uniform(-1, 1)))
    return model


def test_planted_weights_are_found() -> None:
    truth, model = CostModel(TRUE), _taught(_works(2000), noise=0.02)
    assert model.is_ready
    for work in _works(200, seed=3):
        assert model.step(work) == pytest.approx(truth.step(work), rel=0.05)
    assert model.weights.tokens == pytest.approx(TRUE.tokens, rel=0.1)
    assert 0 < model.margin < 0.01


def test_it_says_nothing_before_it_has_seen_enough() -> None:
    model = _taught(_works(20))
    assert not model.is_ready
    assert model.step(Work(decode=5)) == 0.0


def test_where_nobody_learns_everything_is_free() -> None:
    free, work = Costs(), Work(tokens=5, chunks=1)
    free.observe(work, 1.0)
    assert not free.is_ready
    assert free.step(work) == free.prefill(5) == free.decode(5, 5) == free.copy(5) == 0.0


def test_prompts_alone_teach_too() -> None:
    model, truth = CostModel(), CostModel(TRUE)
    for count in range(16, 400):
        work = Work(count, pairs_of(0, count), chunks=1)
        model.observe(work, truth.step(work))
    work = Work(256, pairs_of(0, 256), chunks=1)
    assert model.step(work) == pytest.approx(truth.step(work), rel=0.02)


def test_weights_are_never_negative() -> None:
    model, rng = CostModel(), random.Random(5)
    for work in _works(500):
        model.observe(work, 0.02 + 0.01 * rng.random())  # nothing in it depends on the work
    assert min(model.weights) >= 0.0
    assert model.step(Work(decode=10, context=1000)) == pytest.approx(0.025, rel=0.2)


def test_what_was_learned_about_prompts_outlives_a_long_time_without_any() -> None:
    model = _taught(_works(1000))
    before = model.prefill(500)
    truth = CostModel(TRUE)
    for work in _works(20_000, seed=9, is_mixed=False):
        model.observe(work, truth.step(work))
    assert model.prefill(500) == pytest.approx(before, rel=0.2)


def test_an_odd_step_teaches_nothing_and_a_lasting_change_does() -> None:
    works = _works(1000)
    model, truth = _taught(works), CostModel(TRUE)
    before = model.weights
    for _ in range(3):
        model.observe(works[0], 5.0)
    assert model.weights == before
    slower = CostModel(Weights(*(3 * weight for weight in TRUE)))
    for work in _works(6000, seed=4):
        model.observe(work, slower.step(work))
    assert model.step(works[0]) > 2 * truth.step(works[0])


def test_a_fixed_model_learns_nothing_but_how_many_decode() -> None:
    model = CostModel(TRUE)
    for _ in range(500):
        model.observe(Work(decode=32), 9.0)
    assert model.weights == TRUE
    assert model.mean_decode == pytest.approx(32, rel=0.1)
    alone = TRUE.base / model.mean_decode + TRUE.decode + TRUE.context * (100 + 10 / 2)
    assert model.decode(100, 10) == pytest.approx(10 * alone)


def test_a_chunk_fills_what_is_left_of_the_time() -> None:
    model = CostModel(TRUE)
    work = Work(decode=20, context=4000)
    count = model.chunk_within(0.1, work, start=300)
    full = work._replace(tokens=count, pairs=pairs_of(300, count), chunks=1)
    assert model.step(full) <= 0.1 < model.step(full._replace(tokens=count + 2, pairs=pairs_of(300, count + 2)))
    assert model.chunk_within(0.001, work, 0) == 0
    linear = CostModel(TRUE._replace(pairs=0.0))
    assert linear.chunk_within(0.1, work, 0) == pytest.approx(
        (0.1 - linear.step(work._replace(chunks=1))) / TRUE.tokens, abs=1
    )
    assert CostModel(Weights(base=0.01)).chunk_within(1.0, work, 0) > 1_000_000


def test_a_pacer_gives_whole_blocks_up_to_the_target_and_never_nothing() -> None:
    pacer = TargetPacer(CostModel(TRUE), 0.05, block_size=16)
    work = Work(decode=10, context=1000)
    count = pacer.tokens(0.0, work, 0)
    assert count % 16 == 0
    assert FLOOR < count < 300
    pacer.target = 0.001
    assert pacer.tokens(0.0, work, 0) == FLOOR
    assert not pacer.has_seat(Work(decode=200, context=100_000))
    assert pacer.has_seat(Work(decode=2)), "one row alone breaks the target: two are hardly worse"
    assert pacer.tokens(0.0, Work(), 0) > 1_000_000, "nobody decodes: nobody is kept waiting"
    pacer.target = None
    assert pacer.tokens(0.0, work, 0) > 1_000_000
    assert pacer.has_seat(work)


def test_a_pacer_is_careful_while_costs_are_unknown() -> None:
    pacer = TargetPacer(CostModel(), 0.05)
    assert pacer.tokens(0.0, Work(decode=1), 0) == FIRST
    assert pacer.has_seat(Work(decode=1))


def test_the_first_steps_with_a_chunk_are_learned_from_at_once() -> None:
    """Long after it knows what decoding costs, the first long prompt comes, whole: the next one must be cut."""
    model, truth = CostModel(), CostModel(Weights(base=0.01, tokens=0.001, decode=0.001))
    for number in range(200):
        work = Work(decode=1 + number % 7, context=100)
        model.observe(work, truth.step(work))
    assert model.chunk_within(0.1, Work(decode=5), 0) == 64
    whole = Work(tokens=1000, pairs=pairs_of(0, 1000), chunks=1)
    model.observe(whole, truth.step(whole))
    assert model.chunk_within(0.1, Work(decode=5), 0) < 300
