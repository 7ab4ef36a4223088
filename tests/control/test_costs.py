"""The cost model finds planted weights, holds on where steps say nothing, and shrugs off the odd step."""

from __future__ import annotations

import random

import pytest
from control.planted_costs import PLANTED

from headway.control.costs import CostModel, CostWeights
from headway.values.work import Costs, Work, pairs_of


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
    for name, found, planted in zip(CostWeights._fields, model.weights, PLANTED, strict=True):
        assert found == pytest.approx(planted, rel=0.02), name


def test_its_predictions_hold_among_noise() -> None:
    model, truth, rng = _taught(seed=2, noise=0.05), CostModel(PLANTED), random.Random(3)
    errors = sorted(abs(model.step(w) / truth.step(w) - 1) for w in (_work(rng, i % 2 == 0) for i in range(500)))
    assert errors[250] < 0.02
    assert errors[475] < 0.06
    assert 0 < model.margin < 0.05


def test_it_says_nothing_before_it_has_seen_enough() -> None:
    model = _taught(seed=1, steps=20)
    assert not model.is_ready
    assert model.step(Work(decode=5)) == 0.0


def test_the_default_costs_learn_nothing_and_are_zero() -> None:
    free, work = Costs(), Work(tokens=5, chunks=1)
    free.observe(work, 1.0)
    assert not free.is_ready
    assert free.step(work) == free.prefill(5) == free.decode(5, 5) == free.copy(5) == 0.0


def test_prompts_alone_teach_too() -> None:
    model, truth = CostModel(), CostModel(PLANTED)
    for count in range(16, 400):
        work = Work(count, pairs_of(0, count), chunks=1)
        model.observe(work, truth.step(work))
    work = Work(256, pairs_of(0, 256), chunks=1)
    assert model.step(work) == pytest.approx(truth.step(work), rel=0.02)


def test_weights_are_never_negative() -> None:
    model, rng = CostModel(), random.Random(5)
    for i in range(500):
        model.observe(_work(rng, i % 2 == 0), 0.02 + 0.01 * rng.random())  # nothing in it depends on the work
    assert min(model.weights) >= 0.0
    assert model.step(Work(decode=10, context=1000)) == pytest.approx(0.025, rel=0.2)


def test_rare_steps_with_chunks_are_learned_not_taken_for_outliers() -> None:
    # One step in fifty carries a chunk, and none of the first hundred: the first fit knows nothing of prompts.
    rng, truth, model = random.Random(4), CostModel(PLANTED), CostModel()
    for i in range(3000):
        work = _work(rng, i > 100 and i % 50 == 0)
        model.observe(work, truth.step(work))
    probe = Work(512, pairs_of(1000, 512), 10, 4000, 1)
    assert model.step(probe) == pytest.approx(truth.step(probe), rel=0.05)


def test_rare_copies_are_learned_not_taken_for_outliers() -> None:
    # A device's steps, which hardly differ; later one in eight brings 38 blocks back, which adds a quarter.
    model, rng = CostModel(), random.Random(4)
    for i in range(500):
        copies = 38 if i % 8 == 7 and i > 100 else 0
        model.observe(
            Work(decode=64, context=40_000 + i, copies=copies), 6.4e-3 + 42e-6 * copies + rng.gauss(0.0, 5e-6)
        )
    assert model.copy(38) == pytest.approx(1.6e-3, rel=0.05)


def test_what_was_learned_about_prompts_outlives_a_long_time_without_any() -> None:
    model, truth, rng = _taught(seed=8), CostModel(PLANTED), random.Random(9)
    before = model.prefill(500)
    for _ in range(20_000):
        work = _work(rng, is_mixed=False)
        model.observe(work, truth.step(work))
    assert model.prefill(500) == pytest.approx(before, rel=0.2)


def test_a_pause_of_the_machine_teaches_nothing() -> None:
    model, work = _taught(seed=5), Work(decode=10, context=1000)
    before = model.step(work)
    for _ in range(10):
        model.observe(work, 2.0)
        for _ in range(20):
            model.observe(work, CostModel(PLANTED).step(work))
    assert model.step(work) == pytest.approx(before, rel=0.02)


def test_a_few_odd_steps_in_a_row_teach_nothing_either() -> None:
    model = _taught(seed=5)
    before = model.weights
    for _ in range(3):
        model.observe(Work(decode=10, context=1000), 5.0)
    assert model.weights == before


def test_a_change_that_lasts_is_the_new_truth() -> None:
    model, slower, rng = _taught(seed=6), CostModel(CostWeights(*(2 * w for w in PLANTED))), random.Random(7)
    for i in range(6000):
        work = _work(rng, i % 2 == 0)
        model.observe(work, slower.step(work))
    probe = Work(decode=30, context=9000)
    assert model.step(probe) == pytest.approx(slower.step(probe), rel=0.1)


def test_a_fixed_model_learns_nothing_but_how_many_decode() -> None:
    model = CostModel(PLANTED)
    for _ in range(500):
        model.observe(Work(decode=32), 9.0)
    assert model.weights == PLANTED
    assert model.is_ready
    assert model.mean_decode == pytest.approx(32, rel=0.1)
    alone = PLANTED.base / model.mean_decode + PLANTED.decode + PLANTED.context * (100 + 10 / 2)
    assert model.decode(100, 10) == pytest.approx(10 * alone)


def test_a_chunk_fills_what_the_target_leaves_and_no_more() -> None:
    model, work = CostModel(PLANTED), Work(decode=20, context=5000)
    for start in (0, 3000):
        count = model.chunk_within(0.1, work, start)
        full = work._replace(tokens=count, pairs=pairs_of(start, count), chunks=1)
        more = work._replace(tokens=count + 1, pairs=pairs_of(start, count + 1), chunks=1)
        assert model.step(full) <= 0.1 < model.step(more)
    assert model.chunk_within(0.001, work, 0) == 0
    linear = CostModel(PLANTED._replace(pairs=0.0))
    left = 0.1 - linear.step(work._replace(chunks=1))
    assert linear.chunk_within(0.1, work, 0) == pytest.approx(left / PLANTED.tokens, abs=1)
    assert CostModel(CostWeights(base=0.01)).chunk_within(1.0, work, 0) > 1_000_000


def test_while_it_learns_a_chunk_is_at_most_twice_what_was_seen() -> None:
    model = CostModel()
    for i in range(200):
        model.observe(Work(decode=4 + i % 3, context=100 * (i % 7)), 0.01)
    assert model.is_ready
    assert model.chunk_within(10.0, Work(decode=1), 0) == 64
    model.observe(Work(100, 10_000, 4, 100, 1), 0.03)
    assert model.chunk_within(10.0, Work(decode=1), 0) <= 200


def test_the_first_steps_with_a_chunk_are_learned_from_at_once() -> None:
    """Long after it knows what decoding costs, the first long prompt comes, whole: the next one must be cut."""
    model, truth = CostModel(), CostModel(CostWeights(base=0.01, tokens=0.001, decode=0.001))
    for number in range(200):
        work = Work(decode=1 + number % 7, context=100)
        model.observe(work, truth.step(work))
    assert model.chunk_within(0.1, Work(decode=5), 0) == 64
    whole = Work(tokens=1000, pairs=pairs_of(0, 1000), chunks=1)
    model.observe(whole, truth.step(whole))
    assert model.chunk_within(0.1, Work(decode=5), 0) < 300


def test_what_mixed_steps_exceed_their_prediction_by_is_kept_free() -> None:
    model = CostModel(CostWeights(base=1.0, tokens=0.125))
    assert model.chunk_within(2.0, Work(), 0) == 8
    model.margin = 0.5
    assert model.chunk_within(2.0, Work(), 0) == 4


def test_chunks_of_one_size_do_not_stay_that_size() -> None:
    # Short chunks seemed dearer than longer ones, so tokens seemed to be free; then all chunks are of the least size.
    model, truth, target = CostModel(), CostModel(PLANTED), 0.1
    sizes, longest = [], 0.0
    for i in range(1000):
        if i == 200:
            assert model.weights.tokens == 0
        decode = Work(decode=5 + i % 11, context=4000)
        count = (64, 40)[i % 2] if i < 200 else model.chunk_within(target, decode, 0)
        work = decode._replace(tokens=count, pairs=pairs_of(0, count), chunks=1)
        seconds = truth.step(work) if i >= 200 else 0.03 - 1e-4 * count
        model.observe(work, seconds)
        if i >= 200:
            sizes.append(count)
            longest = max(longest, seconds)
    assert min(sizes[-100:]) > 200
    assert longest < 1.1 * target
