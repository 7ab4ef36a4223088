"""How many replicas a load needs: arithmetic alone, no process."""

from __future__ import annotations

import math
import random

import pytest

from headway.cluster.autoscale import FleetLoad, LoadWindow, ScaleLimits, target_replicas
from headway.errors import ConfigError

LIMITS = ScaleLimits(least=1, most=10, per_replica=10.0, wait_s=1.0, hold_s=60.0)


def load(ready: int, running: int, waiting: int = 0, *, starting: int = 0, wait_s: float = 0.0) -> FleetLoad:
    """With nothing more than that of late."""
    return FleetLoad(ready, starting, running, waiting, wait_s)


def test_open_requests_decide_and_replicas_that_start_are_not_ordered_twice() -> None:
    assert target_replicas(load(2, 25), LIMITS) == 3
    assert target_replicas(load(2, 25, starting=1), LIMITS) == 3
    assert target_replicas(load(2, 25, 10), LIMITS) == 4
    assert target_replicas(load(1, 500), LIMITS) == 10
    assert target_replicas(load(0, 0), LIMITS) == 1


def test_a_long_wait_grows_the_fleet_in_its_ratio_and_at_most_twofold() -> None:
    assert target_replicas(load(4, 8, wait_s=1.2), LIMITS) == 5
    assert target_replicas(load(4, 8, wait_s=90.0), LIMITS) == 8
    assert target_replicas(load(4, 8, starting=4, wait_s=90.0), LIMITS) == 8
    assert target_replicas(FleetLoad(4, 4, 8, 0, wait_s=0.0, most_wait_s=90.0), LIMITS) == 8


def test_a_lost_replica_is_replaced_if_the_load_needs_it() -> None:
    assert target_replicas(load(3, 40), LIMITS) == 4
    assert target_replicas(load(3, 24), LIMITS) == 3


def test_the_load_that_grew_the_fleet_does_not_shrink_it() -> None:
    """What one decides at a load it decides again at the same load, and at one that is a little smaller."""
    rng = random.Random(0)
    for _ in range(2_000):
        num_open, wait_s = rng.randint(0, 90), rng.choice((0.0, rng.uniform(0, 3)))
        grown = target_replicas(load(rng.randint(1, 9), num_open, wait_s=wait_s), LIMITS)
        assert target_replicas(load(grown, num_open), LIMITS) <= grown
        wanted = max(1, math.ceil(num_open / 10))
        assert target_replicas(load(wanted, num_open), LIMITS) == wanted
        assert target_replicas(load(wanted, num_open * 9 // 10), LIMITS) == wanted


def test_a_fleet_shrinks_only_after_the_whole_window_was_quiet() -> None:
    window, busy, quiet = LoadWindow(LIMITS.hold_s), load(6, 60), load(6, 4)
    wanted = [target_replicas(window.note(float(now), busy if now < 30 else quiet), LIMITS) for now in range(100)]
    assert wanted[:90] == [6] * 90
    assert wanted[90:] == [1] * 10
    window = LoadWindow(LIMITS.hold_s)
    assert target_replicas(window.note(0.0, quiet), LIMITS) == 6  # what was before is not known
    assert target_replicas(window.note(60.0, quiet), LIMITS) == 1


def test_a_fleet_whose_requests_waited_lately_gives_up_nothing() -> None:
    window = LoadWindow(LIMITS.hold_s)
    for now in range(70):
        window.note(float(now), load(6, 4))
    assert target_replicas(window.note(70.0, load(6, 4, wait_s=0.6)), LIMITS) == 6
    assert target_replicas(window.note(100.0, load(6, 4)), LIMITS) == 6
    assert target_replicas(window.note(131.0, load(6, 4)), LIMITS) == 1


def test_the_window_knows_the_largest_of_the_last_seconds() -> None:
    rng, window = random.Random(1), LoadWindow(5.0)
    loads = [(float(now) / 2, rng.randint(0, 50)) for now in range(200)]
    for at, (now, num_open) in enumerate(loads):
        noted = window.note(now, load(1, num_open))
        assert noted.most_open == max(value for then, value in loads[: at + 1] if then >= now - 5.0)
        assert noted.num_open == num_open


def test_limits_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 to 2 replicas; allowed"):
        ScaleLimits(least=5, most=2)
    with pytest.raises(ConfigError, match=r"per_replica of the autoscaler is 0; allowed"):
        ScaleLimits(per_replica=0)
    with pytest.raises(ConfigError, match=r"wait_s of the autoscaler is nan"):
        ScaleLimits(wait_s=math.nan)
