"""The workloads: their lengths are part of their names, and the limit is plain arithmetic over them."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.bench.limit import Machine, Matrices, StepShape, ideal_steps, limit
from headway.bench.workload import WorkItem, bimodal, chat_mix, fit, named, uniform
from headway.errors import ConfigError
from tiny_models import tiny_spec


def lengths(works: list[WorkItem]) -> list[tuple[int, int]]:
    return [(len(work.tokens), work.max_tokens) for work in works]


def test_chat_mix_has_its_recorded_lengths_and_tokens() -> None:
    works = chat_mix(8, seed=0)
    assert lengths(works) == [(60, 155), (25, 31), (127, 21), (50, 256), (56, 165), (27, 59), (64, 85), (114, 20)]
    assert works[0].tokens[:4] == [33526, 31865, 26557, 19897]
    for count, in_tokens, out_tokens in ((32, 3520, 3165), (64, 7774, 5365)):
        works = chat_mix(count)
        assert sum(len(work.tokens) for work in works) == in_tokens
        assert sum(work.max_tokens for work in works) == out_tokens
    assert lengths(chat_mix(2, seed=7)) == [(50, 37), (15, 59)]


def test_bimodal_has_exactly_one_long_answer_in_ten() -> None:
    works = bimodal(160, seed=3)
    assert Counter(lengths(works)) == {(30, 10): 144, (30, 400): 16}
    assert lengths(works) != lengths(bimodal(160, seed=4))
    assert sum(work.max_tokens == 400 for work in bimodal(20)) == 2


def test_uniform_stays_in_its_range() -> None:
    works = uniform(160)
    assert {len(work.tokens) for work in works} == {30}
    assert 10 <= min(work.max_tokens for work in works) <= 15
    assert 85 <= max(work.max_tokens for work in works) <= 90


def test_every_kind_repeats_itself_for_a_seed() -> None:
    for name in ("chat-mix", "bimodal", "uniform"):
        make = named(name).make
        assert make(5, 11) == make(5, 11) != make(5, 12)
    with pytest.raises(ConfigError, match="chat-mix, bimodal, uniform"):
        named("sharegpt")


def test_a_small_vocabulary_changes_tokens_and_no_length() -> None:
    works = chat_mix(4)
    fitted = fit(works, vocab_size=100, max_len=1000)
    assert lengths(fitted) == lengths(works)
    assert max(max(work.tokens) for work in fitted) < 100
    with pytest.raises(ConfigError, match="context is 100"):
        fit(works, vocab_size=100, max_len=100)


def test_ideal_steps_of_a_hand_example() -> None:
    works = [WorkItem([1] * 5, 3), WorkItem([1] * 2, 1), WorkItem([1] * 4, 2)]
    # Two slots: the second request ends in its first step, the third takes its slot in the next one.
    assert list(ideal_steps(works, slots=2)) == [StepShape(7, 2), StepShape(1 + 4, 2), StepShape(1 + 1, 2)]
    assert list(ideal_steps(works, slots=8)) == [StepShape(11, 3), StepShape(2, 2), StepShape(1, 1)]


def test_limit_of_a_hand_example_takes_the_slower_of_compute_and_reading() -> None:
    works = [WorkItem([1] * 5, 3), WorkItem([1] * 2, 1), WorkItem([1] * 4, 2)]
    matrices = Matrices(layers=10, head=4, num_bytes=56.0)
    machine = Machine(flops=1.0, read_bytes=0.5)  # a read takes 112 s
    seconds = (2 * (10 * 11 + 4 * 3)) + 112 + 112
    assert limit(works, 8, matrices, machine) == pytest.approx(6 / seconds)


def test_matrices_count_what_a_step_multiplies_with() -> None:
    spec = tiny_spec()
    per_layer = 60 * (60 + 2 * 20) + 60 * 60 + 3 * 60 * 77
    assert Matrices.of(spec, "int8") == Matrices(2 * per_layer, 131 * 60, 2 * per_layer + 131 * 60)
    assert Matrices.of(spec, "float32").num_bytes == 4 * (2 * per_layer + 131 * 60)
    assert Matrices.of(spec, "q4").num_bytes == pytest.approx(0.625 * (2 * per_layer + 131 * 60))


def test_limit_is_the_published_one() -> None:
    smollm2 = Matrices(106_168_320, 28_311_552, 4.0 * (106_168_320 + 28_311_552))
    limits = [limit(chat_mix(count), 256, smollm2, Machine(220e9, 20e9)) for count in (32, 64, 128)]
    assert [round(value) for value in limits] == [301, 324, 365]
