"""The cost model finds what steps cost, and what predicts with it keeps its word."""

from __future__ import annotations

import random

import pytest

from headway.control.costs import CostModel, Weights
from headway.control.pacer import FIRST, FLOOR, TargetPacer
from headway.values.work import Work, pairs_of

PLANTED = Weights(
    base=5e-3, mixed=1e-3, tokens=0.2e-3, pairs=2e-8, decode=0.1e-3, context=1e-6, chunks=0.3e-3, copies=0.05e-3
)


def _work(rng: random.Random, is_mixed: bool) -> Work:
    decode = rng.randint(0, 60) + (not is_mixed)
    context = decode * rng.randint(10, 800)
    if not is_mixed:
        return Work(decode=decode, context=context, copies=rng.randint(0, 4))
    tokens, start = rng.randint(16, 1024), rng.randint(0, 4000)
    return Work(tokens, pairs_of(start, tokens), decode, context, rng.randint(1, 4), rng.randint(0, 4))


def _taught(seed: int, steps: int = 2000, noise: float = 0.0, mixed: float = 0.5) -> CostModel:
    rng, truth, model = random.Random(seed), CostModel(PLANTED), CostModel()
    for _ in range(steps):
        work = _work(rng, rng.random() < mixed)
        model.observe(work, truth.step(work) * (1 + rng.gauss(0.0, noise)))
    return model


def test_it_recovers_planted_weights() -> None:
    model = _taught(seed=1)
    for name, found, planted in zip(Weights._fields, model.weights, PLANTED, strict=True):
        assert found == pytest.approx(planted, rel=0.02), name


def test_its_predictions_hold_among_noise() -> None:
    model, truth, rng = _taught(seed=2, noise=0.05), CostModel(PLANTED), random.Random(3)
    errors = sorted(abs(model.step(w) / truth.step(w) - 1) for w in (_work(rng, i % 2 == 0) for i in range(500)))
    assert errors[250] < 0.02
    assert errors[475] < 0.06


def test_rare_steps_with_chunks_are_learned_not_taken_for_outliers() -> None:
    # One step in fifty carries a chunk, and none of the first hundred: the first fit knows nothing of prompts.
    rng, truth, model = random.Random(4), CostModel(PLANTED), CostModel()
    for i in range(3000):
        work = _work(rng, i > 100 and i % 50 == 0)
        model.observe(work, truth.step(work))
    probe = Work(512, pairs_of(1000, 512), 10, 4000, 1)
    assert model.step(probe) == pytest.approx(truth.step(probe), rel=0.05)


def test_a_pause_of_the_machine_teaches_nothing() -> None:
    model, work = _taught(seed=5), Work(decode=10, context=1000)
    before = model.step(work)
    for _ in range(10):
        model.observe(work, 2.0)
        for _ in range(20):
            model.observe(work, CostModel(PLANTED).step(work))
    assert model.step(work) == pytest.approx(before, rel=0.02)


def test_a_change_that_lasts_is_the_new_truth() -> None:
    model, slower, rng = _taught(seed=6), CostModel(Weights(*(2 * w for w in PLANTED))), random.Random(7)
    for i in range(6000):
        work = _work(rng, i % 2 == 0)
        model.observe(work, slower.step(work))
    probe = Work(decode=30, context=9000)
    assert model.step(probe) == pytest.approx(slower.step(probe), rel=0.1)


def test_given_weights_are_not_learned_over() -> None:
    model = CostModel(PLANTED)
    for _ in range(100):
        model.observe(Work(decode=1), 9.0)
    assert model.weights == PLANTED
    assert model.is_ready


def test_a_chunk_fills_what_the_target_leaves_and_no_more() -> None:
    model, work = CostModel(PLANTED), Work(decode=20, context=5000)
    for start in (0, 3000):
        count = model.chunk_within(0.1, work, start)
        full = work._replace(tokens=count, pairs=pairs_of(start, count), chunks=1)
        more = work._replace(tokens=count + 1, pairs=pairs_of(start, count + 1), chunks=1)
        assert model.step(full) <= 0.1 < model.step(more)
    assert model.chunk_within(0.001, work, 0) == 0


def test_while_it_learns_a_chunk_is_at_most_twice_what_was_seen() -> None:
    model = CostModel()
    for i in range(200):
        model.observe(Work(decode=4 + i % 3, context=100 * (i % 7)), 0.01)
    assert model.is_ready
    assert model.chunk_within(10.0, Work(decode=1), 0) == 64
    model.observe(Work(100, 10_000, 4, 100, 1), 0.03)
    assert model.chunk_within(10.0, Work(decode=1), 0) <= 200


def test_the_pacer_keeps_the_target_in_whole_blocks_and_always_gets_on() -> None:
    pacer = TargetPacer(CostModel(PLANTED), 0.1, block_size=16)
    work = Work(decode=20, context=5000)
    for target in (0.1, 0.0953, 0.0871):
        pacer.target = target
        count = pacer.tokens(0.0, work, 0)
        assert count % 16 == 0
        assert CostModel(PLANTED).step(work._replace(tokens=count, pairs=pairs_of(0, count), chunks=1)) <= target
    pacer.target = 0.001
    assert pacer.tokens(0.0, work, 0) == FLOOR
    assert not pacer.has_seat(work)
    pacer.target = None
    assert pacer.tokens(0.0, work, 0) > 1 << 20
    assert pacer.has_seat(work)


def test_the_pacer_holds_nobody_back_where_nobody_decodes() -> None:
    assert TargetPacer(CostModel(PLANTED), 0.1).tokens(0.0, Work(), 0) > 1 << 20


def test_the_pacer_begins_small_while_nothing_is_known() -> None:
    pacer = TargetPacer(CostModel(), 0.1)
    assert pacer.tokens(0.0, Work(decode=1), 0) == FIRST
    assert pacer.has_seat(Work(decode=1000))
