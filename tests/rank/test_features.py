from __future__ import annotations

import random
import timeit
from collections.abc import Sequence

import numpy as np
import pytest

from headway.rank.features import HEAD, NUM_DENSE, NUM_ONCE, NUM_SLOTS, TAIL, extract
from headway.rank.model import RankModel
from headway.values.params import SamplingParams

PARAMS = SamplingParams(max_tokens=100)


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [0],
        [5, 6],
        list(range(100_000)),
        [-1, -(2**31), 2**31, 2**63 - 1],
        [2**64, -(2**80), 10**30],
        (1, 2, 3),
        range(7),
        [True, False],
        np.arange(600),
    ],
    ids=["none", "one", "two", "many", "signed", "beyond words", "tuple", "range", "bools", "array"],
)
@pytest.mark.parametrize("name", ["", "ann", "\0\n", "\ud800", "名" * 5000])
def test_any_prompt_gets_a_length_within_its_limit(tokens: Sequence[int], name: str) -> None:
    model = RankModel.empty()
    model.slots[:] = np.random.default_rng(0).normal(size=model.slots.shape)
    model.dense[:] = 1e4  # scores far beyond anything learned
    features = extract(tokens, name, name, SamplingParams(max_tokens=7))
    assert features.dense.shape == (NUM_DENSE,)
    assert np.isfinite(features.dense).all()
    assert features.slots.min() >= 0
    assert features.slots.max() < NUM_SLOTS
    expected = model.expect(features)
    assert 1.0 <= expected.median <= expected.ceiling <= 7.0


def test_first_and_last_tokens_are_seen_and_the_middle_is_not() -> None:
    tokens = list(range(1000, 1000 + HEAD + TAIL + 200))
    same = extract(tokens, "", "", PARAMS).slots
    assert len(same) == NUM_ONCE + 2 * (HEAD + TAIL) - 1
    for place, is_seen in ((0, True), (HEAD - 1, True), (HEAD, False), (-TAIL - 1, False), (-TAIL, True), (-1, True)):
        other = list(tokens)
        other[place] = 7
        assert (extract(other, "", "", PARAMS).slots.tolist() != same.tolist()) == is_seen, place


def test_a_pair_of_neighbours_is_not_the_pair_turned_round() -> None:
    there, back = (sorted(extract(tokens, "", "", PARAMS).slots[NUM_ONCE:].tolist()) for tokens in ([7, 9], [9, 7]))
    assert there != back
    assert len(set(there) & set(back)) == 2, "the ids by themselves are the same"


def test_a_prompt_of_500_tokens_is_scored_in_100_us() -> None:
    """The best of many tries: what the code costs, not what else the machine is doing."""
    rng, model = random.Random(0), RankModel.empty()
    tokens = [rng.randrange(50_000) for _ in range(500)]
    best = min(timeit.repeat(lambda: model.expect(extract(tokens, "ann", "chat", PARAMS)), number=10, repeat=200)) / 10
    assert best < 100e-6, f"{1e6 * best:.0f} us"


def test_tenant_and_route_matter() -> None:
    seen = {
        tuple(extract(tokens, tenant, route, PARAMS).slots.tolist())
        for tokens, tenant, route in (
            ([1, 2, 3], "", ""),
            ([1, 2, 3], "ann", ""),
            ([1, 2, 3], "", "ann"),
        )
    }
    assert len(seen) == 3


def test_slots_are_spread_evenly() -> None:
    """As many different places as chance gives: the hash loses nothing on ids that follow each other."""
    ids = random.Random(0).sample(range(200_000), 20_000)
    slots = np.concatenate([extract(ids[i : i + 500], "", "", PARAMS).slots[NUM_ONCE:] for i in range(0, 20_000, 500)])
    by_chance = NUM_SLOTS * (1 - (1 - 1 / NUM_SLOTS) ** len(slots))
    assert len(np.unique(slots)) > 0.98 * by_chance
