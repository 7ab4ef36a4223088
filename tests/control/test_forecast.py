"""Sums of what waits before a key, the pace of admissions, and the time to the first token that follows."""

from __future__ import annotations

import math
import random

import pytest

from headway.control.costs import CostModel, CostWeights
from headway.control.forecast import Backlog, place
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.arrival import forecast_ttft
from headway.policies.priority import Priority
from headway.values.limits import Limits
from headway.values.params import SamplingParams


def _request(id: int, count: int = 5) -> Request:
    return Request(id, [1] * count, SamplingParams(max_tokens=8), arrival=float(id))


def test_places_sort_as_keys_do() -> None:
    rng = random.Random(1)
    keys = [(rng.randint(-3, 3), rng.choice([rng.uniform(-5, 5), rng.uniform(0, 1e6)])) for _ in range(2000)]
    keys += [(0, -math.inf), (2, -math.inf), (0, 0.0)]
    places = [place(key) for key in sorted(keys)]
    assert places == sorted(places)
    assert place((5.0,)) == place((0, 5.0))
    assert place((-1e9, 1.0)) < place((-2000, 1.0))


def test_a_class_may_be_infinite_and_no_key_fails() -> None:
    places = [place(key) for key in [(-math.inf, 1.0), (-5, 1.0), (5, 1.0), (math.inf, 1.0), (math.inf, math.inf)]]
    assert places == sorted(places)
    assert len(set(places)) == 5
    for key in [(math.nan, 1.0), (math.nan,), (1.0, math.nan)]:
        backlog = Backlog()
        backlog.push(_request(0), key)
        backlog.remove(0)
        assert backlog.total == 0


def test_sums_equal_those_of_all_smaller_keys() -> None:
    rng, backlog, waiting = random.Random(2), Backlog(), {}
    for id in range(3000):
        key = (rng.choice([-1, 0, 2]), rng.uniform(-1e4, 1e4))
        if rng.random() < 0.6 or not waiting:
            backlog.push(_request(id, rng.randint(1, 50)), key)
            waiting[id] = (key, backlog._of[id][1])
        else:
            gone = rng.choice(list(waiting))
            backlog.remove(gone)
            del waiting[gone]
        assert backlog.total == sum(count for _, count in waiting.values())
        if id % 20 == 0:
            assert backlog.ahead(key) == sum(count for each, count in waiting.values() if place(each) <= place(key))
    for gone in list(waiting):
        backlog.remove(gone)
    assert backlog.total == 0
    assert not any(backlog._sums), "a sum of zero is not kept"
    backlog.remove(12345)
    assert backlog.total == 0


def test_a_request_whose_place_changes_counts_once() -> None:
    backlog = Backlog()
    backlog.push(_request(0, 5), (9.0,))
    backlog.push(_request(0, 5), (1.0,))
    assert backlog.total == backlog.ahead((2.0,)) == 5


def test_the_pace_is_that_of_admissions_while_others_waited() -> None:
    backlog = Backlog()
    for id in range(100):
        backlog.push(_request(id, 50), (float(id),))
    assert math.isnan(backlog.rate((0.0,)))
    for step in range(80):
        backlog.begin(0.5 * step)
        backlog.remove(step, is_admitted=True)
        backlog.end(0.5 * step)
    assert backlog.rate((0.0,)) == pytest.approx(100.0, rel=0.05)


def test_a_clock_that_goes_back_by_hours_takes_no_time() -> None:
    backlog = Backlog()
    for id in range(3):
        backlog.push(_request(id, 50), (float(id),))
    backlog.begin(30000.0)
    backlog.end(30000.0)
    for now in (0.0, 0.5):
        backlog.begin(now)
        backlog.remove(0, is_admitted=True)
        backlog.end(now)
    backlog.begin(0.5)
    assert backlog.rate((0.0,)) == pytest.approx(100.0, rel=0.05)


def test_a_request_admitted_at_once_does_not_change_the_pace() -> None:
    backlog = Backlog()
    for step in range(10):
        backlog.push(_request(step, 50), (float(step),))
        backlog.begin(float(step))
        backlog.remove(step, is_admitted=True)
        backlog.end(float(step))
    assert math.isnan(backlog.rate((0.0,)))
    for id in range(10, 50):
        backlog.push(_request(id, 50), (float(id),))
    for step in range(10, 40):
        backlog.begin(float(step))
        backlog.remove(step, is_admitted=True)
        backlog.end(float(step))
    assert backlog.rate((0.0,)) == pytest.approx(50.0, rel=0.1)


def test_the_pace_of_a_class_is_what_more_urgent_ones_leave_to_it() -> None:
    backlog, now = Backlog(), 0.0
    for id in range(400):
        backlog.push(_request(id, 10), (id % 2, float(id)))
    for step in range(150):
        backlog.begin(now)
        if step % 3 == 0:
            backlog.remove(2 * step + 1, is_admitted=True)
        backlog.remove(2 * step, is_admitted=True)
        backlog.end(now)
        now += 0.1
    assert backlog.rate((0, 0.0)) == pytest.approx(133.0, rel=0.05)
    assert backlog.rate((1, 0.0)) == pytest.approx(33.0, rel=0.1)
    assert backlog.rate((2, 0.0)) == backlog.rate((0, 0.0)), "a class without admissions has the rate of all"


def _scheduler(costs: CostModel | None, rows: int = 1) -> Scheduler:
    return Scheduler(KVLedger(64, 4, caching=False), Limits(rows, 64), Policy(), costs=costs, observer=Backlog())


def test_the_first_token_is_not_predicted_before_costs_are_known() -> None:
    assert forecast_ttft(_scheduler(None), _request(0)) is None


def test_alone_the_first_token_takes_the_steps_of_its_prompt() -> None:
    scheduler = _scheduler(CostModel(CostWeights(base=1.0, tokens=0.01)))
    assert forecast_ttft(scheduler, _request(0, 10)) == pytest.approx(1.1)
    assert forecast_ttft(scheduler, _request(0, 100)) == pytest.approx(3.0), "two steps of at most 64 tokens"


def test_the_more_waits_before_it_the_later_the_first_token() -> None:
    scheduler = _scheduler(CostModel(CostWeights(base=1.0, tokens=0.01)))
    times = []
    for id in range(5):
        times.append(forecast_ttft(scheduler, _request(id, 10)))
        scheduler.add(_request(id, 10))
        scheduler.schedule(float(id))
    assert times[2] < times[3] < times[4]


def test_a_request_that_preempts_others_does_not_wait_for_a_slot() -> None:
    for priority, waits in ((-1, False), (0, True)):
        costs = CostModel(CostWeights(base=1.0, tokens=0.01))
        scheduler = Scheduler(
            KVLedger(64, 4, caching=False), Limits(1, 64), Priority(), costs=costs, observer=Backlog()
        )
        scheduler.add(_request(0, 10))
        scheduler.schedule(0.0)
        scheduler.add(_request(1, 10))
        scheduler.schedule(1.0)
        urgent = _request(2, 10)
        urgent.priority = priority
        predicted = forecast_ttft(scheduler, urgent)
        assert predicted is not None
        assert (predicted > 1.2) is waits, predicted


def test_less_urgent_prompts_under_way_do_not_delay_a_more_urgent_one() -> None:
    costs = CostModel(CostWeights(base=1.0, tokens=0.01))
    scheduler = Scheduler(KVLedger(256, 4, caching=False), Limits(4, 64), Priority(), costs=costs, observer=Backlog())
    scheduler.add(_request(0, 400))
    scheduler.schedule(0.0)
    for priority, predicted in ((-1, 1.6), (0, 3.2)):
        urgent = _request(1, 60)
        urgent.priority = priority
        assert forecast_ttft(scheduler, urgent) == pytest.approx(predicted), (
            "one step, or two with as much of the other"
        )


def test_prompts_before_it_cost_what_each_costs_and_not_what_one_long_prompt_would() -> None:
    costs = CostModel(CostWeights(tokens=1e-3, pairs=1e-4))
    scheduler = Scheduler(KVLedger(512, 4, caching=False), Limits(8, 64), Policy(), costs=costs, observer=Backlog())
    alone = costs.prefill(40)
    for id in range(10):
        scheduler.add(_request(id, 40))
    assert forecast_ttft(scheduler, _request(10, 40)) == pytest.approx(11.5 * alone), "ten before it, and its own"
    scheduler = Scheduler(KVLedger(512, 4, caching=False), Limits(8, 64), Policy(), costs=costs, observer=Backlog())
    scheduler.add(_request(0, 100))
    scheduler.schedule(0.0)
    left = costs.prefill(36, start=64)
    assert forecast_ttft(scheduler, _request(1, 40)) == pytest.approx(alone + left)
