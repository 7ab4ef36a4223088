from __future__ import annotations

import math
import random

import pytest

from headway.rank.tau import kendall_tau


def brute_force(xs: list[float], ys: list[float]) -> float:
    agree = tied_x = tied_y = total = 0
    for i in range(len(xs)):
        for j in range(i):
            dx, dy = xs[i] - xs[j], ys[i] - ys[j]
            total += 1
            tied_x += dx == 0
            tied_y += dy == 0
            agree += (dx * dy > 0) - (dx * dy < 0)
    norm = math.sqrt(total - tied_x) * math.sqrt(total - tied_y)
    return agree / norm if norm else 0.0


@pytest.mark.parametrize("seed", range(60))
def test_tau_equals_the_count_over_all_pairs(seed: int) -> None:
    rng = random.Random(seed)
    num_values = rng.choice([1, 2, 5, 1000])  # few values: many ties, on either side and on both
    count = rng.randrange(60)
    xs = [float(rng.randrange(num_values)) for _ in range(count)]
    ys = [float(rng.randrange(num_values)) + (x if seed % 2 else 0.0) for x in xs]
    assert kendall_tau(xs, ys) == pytest.approx(brute_force(xs, ys), abs=1e-12), f"seed {seed}"


def test_tau_of_known_orders() -> None:
    rising = [float(value) for value in range(100)]
    assert kendall_tau(rising, rising) == pytest.approx(1.0)
    assert kendall_tau(rising, rising[::-1]) == pytest.approx(-1.0)
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall_tau([1.0] * 5, [1, 2, 3, 4, 5]) == 0.0
    assert kendall_tau([], []) == 0.0


def test_tau_wants_as_many_on_both_sides() -> None:
    with pytest.raises(ValueError, match="2 and 1 values"):
        kendall_tau([1, 2], [1])
