"""The counter-based generator: uniform, and a pure function of (seed, position)."""

import numpy as np
import pytest

from headway.runner.rng import uniform


def _line(seed: int, num: int) -> np.ndarray:
    return np.array([uniform(seed, position) for position in range(num)])


def _chi_square(values: np.ndarray, num_bins: int = 64) -> float:
    seen = np.bincount((values * num_bins).astype(np.int64), minlength=num_bins)
    expected = len(values) / num_bins
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, 2, -1, 2**63, 2**64 - 1, 123456789])
def test_positions_of_one_seed_are_uniform(seed: int) -> None:
    values = _line(seed, 64_000)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert _chi_square(values) < 130  # 63 degrees of freedom: beyond is one in a million


@pytest.mark.parametrize("position", [0, 1, 17, 4095])
def test_seeds_at_one_position_are_uniform(position: int) -> None:
    values = np.array([uniform(seed, position) for seed in range(64_000)])
    assert _chi_square(values) < 130


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    here, there = _line(41, 50_000), _line(42, 50_000)
    assert abs(np.corrcoef(here, there)[0, 1]) < 0.02
    assert abs(np.corrcoef(here[:-1], here[1:])[0, 1]) < 0.02
    # A seed one step of the counter away must not be the same sequence, shifted.
    shifted = _line(41 + 0x9E3779B97F4A7C15, 50_000)
    assert not np.isin(shifted, here).any()


def test_a_negative_seed_is_a_seed_of_its_own() -> None:
    assert uniform(-5, 77) == uniform(2**64 - 5, 77)
    assert len({uniform(seed, 77) for seed in (-5, 5, 2**64 - 6)}) == 3


def test_the_numbers_never_change_between_releases() -> None:
    # Users keep seeds: a change here changes every seeded answer.
    pinned = [0.11703298039315357, 0.42704551766005894, 0.310196945443338]
    assert [uniform(0, 0), uniform(42, 7), uniform(-1, 1000)] == pinned
