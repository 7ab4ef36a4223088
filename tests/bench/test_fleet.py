"""Many engines under a virtual clock: the same every time, and what routes, cells, losses and scaling come to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from headway.bench.fleet.arrivals import MadeUp, TraceArrival
from headway.bench.fleet.node import NodeSetup
from headway.bench.fleet.report import FleetReport, Served
from headway.bench.fleet.scale import ScaleSetup
from headway.bench.fleet.simulation import FleetSetup, ReplicaLoss, simulate_fleet
from headway.cluster.scaling import ScaleRule
from headway.errors import ConfigError
from headway.values.params import Slo

NODE = NodeSetup(num_blocks=400)
SETUP = FleetSetup(num_replicas=4, node=NODE, start_s=3.0)


def popular(count: int, rate: float, seed: int, *, prefixes: int = 8) -> list[TraceArrival]:
    return list(MadeUp(count, rate, seed, num_prefixes=prefixes).arrivals())


def test_equal_arrivals_give_equal_reports() -> None:
    setup = replace(
        SETUP,
        cell_size=2,
        losses=[ReplicaLoss(1.0, 1), ReplicaLoss(2.0, 1, is_machine=True)],
        node=replace(NODE, link_gbps=100.0, tier_gb=50.0),
    )
    one, two = (simulate_fleet(popular(60, 8.0, 1), setup) for _ in range(2))
    assert one == two
    assert len(one.served) == 60
    assert one.num_lost == 0
    assert one != simulate_fleet(popular(60, 8.0, 2), setup)


def test_requests_that_share_a_prefix_reach_a_replica_that_holds_it() -> None:
    arrivals = popular(250, 8.0, 2)
    cost = simulate_fleet(arrivals, SETUP)
    turns = simulate_fleet(arrivals, replace(SETUP, route="round_robin"))
    assert cost.reached >= 0.98
    assert cost.hit_ratio > turns.hit_ratio
    assert cost.skew < 1.3
    assert cost.num_attempts == cost.num_offered == 250


def test_in_quiet_the_route_knows_what_is_cached() -> None:
    report = simulate_fleet(popular(60, 0.3, 3, prefixes=4), SETUP)
    assert report.num_quiet > 40
    assert report.num_wrong == 0


def test_a_route_that_hears_late_sends_requests_to_the_wrong_replicas() -> None:
    arrivals = popular(150, 8.0, 2)
    late = simulate_fleet(arrivals, replace(SETUP, node=replace(NODE, delay=2.0)))
    assert late.hit_ratio < simulate_fleet(arrivals, SETUP).hit_ratio
    assert min(each.ttft for each in late.served) > 4.0  # there and back


@pytest.mark.parametrize("is_machine", [False, True], ids=["processes", "machines"])
def test_no_token_is_lost_with_half_of_the_replicas(is_machine: bool) -> None:
    setup = replace(SETUP, losses=[ReplicaLoss(3.0, 2, is_machine)])
    report = simulate_fleet(popular(120, 16.0, 4), setup)
    assert report.num_lost == 0  # and each got as many tokens as it asked for
    assert report.num_resumed > 0
    assert report.pauses
    assert report.num_attempts <= 1.2 * report.num_offered
    if is_machine:  # silence is noticed after two seconds
        assert 2.0 < max(report.pauses) < 4.0
    else:
        assert max(report.pauses) < 1.0


def test_what_is_lost_starts_again_and_is_paid_for_while_it_starts() -> None:
    arrivals = popular(160, 8.0, 5)
    report = simulate_fleet(arrivals, replace(SETUP, losses=[ReplicaLoss(3.0, 2)]))
    assert len(report.busy) == 4
    assert report.replica_s == pytest.approx(4 * report.makespan, rel=1e-6)


def test_a_whole_fleet_that_ends_keeps_its_requests_until_it_is_back() -> None:
    report = simulate_fleet(popular(60, 8.0, 6), replace(SETUP, losses=[ReplicaLoss(3.0, 4, is_machine=True)]))
    assert report.num_lost == 0
    assert 3.0 < max(report.pauses) < 8.0


def test_no_request_is_lost_when_engines_crash_together() -> None:
    """What is handed on would else reach engines that are about to end, and have been in several crashes."""
    setup = replace(SETUP, num_replicas=8)
    for seed in range(3):
        report = simulate_fleet(popular(160, 40.0, seed), replace(setup, losses=[ReplicaLoss(2.0, 6)], seed=seed))
        assert report.num_lost == 0
        assert report.num_resumed > 0


@pytest.mark.parametrize("seed", range(2))
def test_engines_that_crash_all_together_cost_little_more_than_their_start(seed: int) -> None:
    """None runs alone while others wait, and the first one that is back does not get all that waits."""
    setup = replace(SETUP, num_replicas=8, losses=[ReplicaLoss(2.0, 8)], seed=seed)
    report = simulate_fleet(popular(240, 40.0, seed), setup)
    assert report.num_lost == 0
    assert SETUP.start_s < max(report.pauses) < SETUP.start_s + 3.0


def test_one_crash_costs_a_moment() -> None:
    setup = replace(SETUP, num_replicas=8, losses=[ReplicaLoss(2.0, 1)])
    assert 0.0 < max(simulate_fleet(popular(160, 40.0, 1), setup).pauses) < 0.5


def test_a_step_may_take_as_long_as_was_predicted() -> None:
    """The last chunk of such a prompt takes seven seconds; the front knows so and drops no engine for it."""
    report = simulate_fleet(MadeUp(2, 0.1, 1, num_prompt=200_000).arrivals(), SETUP)
    assert report.num_lost == report.num_resumed == 0


def test_cells_cost_hits_and_balance_and_a_second_cell_gives_balance_back() -> None:
    arrivals = popular(300, 24.0, 7, prefixes=6)
    whole = simulate_fleet(arrivals, SETUP)
    strict = simulate_fleet(arrivals, replace(SETUP, cell_size=1, spill=0.0))
    spilled = simulate_fleet(arrivals, replace(SETUP, cell_size=1, spill=1.25))
    assert len(strict.by_cell) == 4
    assert len(whole.by_cell) == 1
    assert strict.reached == spilled.reached == 1.0 or strict.reached > spilled.reached
    assert whole.skew < spilled.skew < strict.skew
    assert spilled.cell_skew < strict.cell_skew


@pytest.mark.parametrize("where", ["tier", "peers"])
def test_blocks_that_are_elsewhere_take_bandwidth_instead_of_compute(where: str) -> None:
    """Caches too small for all prefixes; or prefixes that the route does not look for."""
    prefixes = popular(120, 6.0, 8, prefixes=24)
    small = FleetSetup(num_replicas=2, node=NodeSetup(num_blocks=64), route="round_robin")
    alone = simulate_fleet(prefixes, small)
    fast, slow = (
        replace(small, node=replace(small.node, tier_gb=40.0, tier_gbps=rate))
        if where == "tier"
        else replace(small, node=replace(small.node, num_blocks=64, link_gbps=rate))
        for rate in (400.0, 4.0)
    )
    with_fast, with_slow = simulate_fleet(prefixes, fast), simulate_fleet(prefixes, slow)
    assert with_fast.num_moved > 0
    assert alone.num_moved == 0
    assert with_fast.hit_ratio > alone.hit_ratio
    assert sum(with_fast.busy) < sum(alone.busy)
    mean = [sum(each.ttft for each in report.served) for report in (with_fast, with_slow)]
    assert mean[0] < mean[1]


def test_an_autoscaler_follows_a_wave_and_costs_less_than_its_peak() -> None:
    load = MadeUp(600, 7.5, 9, num_prefixes=8, shape="diurnal", period_s=80.0)
    limits = ScaleSetup(1, 4, ScaleRule(8.0, 1.0), down_s=10.0)
    arrivals = list(load.arrivals())
    fixed = simulate_fleet(arrivals, SETUP)
    scaled = simulate_fleet(arrivals, replace(SETUP, num_replicas=1, scale=limits))
    sizes = [each.num_ready for each in scaled.timeline]
    assert max(sizes[25:55]) > 1
    assert max(sizes) <= 4
    assert sizes[-1] < max(sizes)
    assert scaled.num_lost == 0
    assert scaled.replica_s < fixed.replica_s
    assert scaled.attainment(Slo(ttft=0.3)) <= fixed.attainment(Slo(ttft=0.3))
    for one, two in pairwise(scaled.timeline):  # nothing is up before it has started for three seconds
        assert two.num_ready - one.num_ready <= one.num_starting


def test_an_autoscaler_replaces_what_is_lost() -> None:
    limits = ScaleSetup(3, 3, ScaleRule(8.0, 1.0))
    setup = replace(SETUP, num_replicas=3, scale=limits, losses=[ReplicaLoss(2.0, 2)])
    report = simulate_fleet(popular(80, 8.0, 10), setup)
    sizes = [each.num_ready for each in report.timeline]
    assert sizes[0] == sizes[-1] == 3
    assert min(sizes) == 1
    assert report.num_lost == 0


def test_arrivals_follow_their_shape() -> None:
    def counts(shape: str) -> list[int]:
        load = MadeUp(4_000, 20.0, 1, num_prompt=1, shape=shape, period_s=100.0)
        found = Counter(int(each.at / 10) for each in load.arrivals())
        return [found[at] for at in range(max(found))]

    steady, diurnal, bursty = counts("steady"), counts("diurnal"), counts("bursty")
    assert max(steady) < 260
    assert min(steady) > 140
    assert diurnal[0] < 100 < 300 < diurnal[5]
    assert max(bursty) > 2 * sorted(bursty)[len(bursty) // 2], bursty
    with pytest.raises(ConfigError, match=r"shape of the load is 'square'; allowed: steady, diurnal, bursty"):
        MadeUp(1, 1.0, shape="square")
    with pytest.raises(ConfigError, match=r"0 requests at 1 per second"):
        MadeUp(0, 1.0)
    with pytest.raises(ConfigError, match=r"0 tokens in each prompt"):
        MadeUp(1, 1.0, num_prompt=0)


def test_a_request_meets_what_it_was_asked_to() -> None:
    served = Served(1.0, 10, num_output=11, first=2.0, ended=4.0, is_answered=True)
    assert served.meets(Slo(ttft=1.0, itl=0.2, deadline=3.0))
    assert not served.meets(Slo(ttft=0.9))
    assert not served.meets(Slo(itl=0.19))
    assert not served.meets(Slo(deadline=2.9))
    assert not Served(1.0, 10).meets(Slo(ttft=1.0))


def test_recovery_lasts_until_requests_are_served_as_before() -> None:
    report = FleetReport(losses=[100.0])
    for at in range(200):
        ttft = 0.1 if not 100 <= at < 107 else 2.0
        report.served.append(Served(float(at), 10, 2, at + ttft, at + ttft + 1, is_answered=True))
    assert report.recovery_s == 7.0
    assert math.isnan(FleetReport(losses=[0.0], served=report.served).recovery_s)
    assert FleetReport(served=report.served).recovery_s == 0.0
