"""edf and slo: deadlines, shedding in time, room for the urgent, and the gap that was promised."""

from __future__ import annotations

import pytest

from headway.bench.virtual import A100, Job
from headway.control.costs import CostModel
from headway.core.policy import Tools
from headway.core.request import Request
from headway.policies.edf import EarliestDeadlineFirst
from headway.policies.slo import SloAware
from headway.values.params import SamplingParams, Slo
from headway.values.work import Work
from served import order, serve

URGENT, CALM = Slo(ttft=2.0), Slo(ttft=30.0)


def _request(id: int, slo: Slo, num_prompt: int = 10, expected: float = 10.0) -> Request:
    return Request(id, [1] * num_prompt, SamplingParams(), slo=slo, expected=expected)


def _slo() -> SloAware:
    policy = SloAware()
    policy.attach(Tools(CostModel(A100)))
    return policy


def test_edf_orders_by_the_moment_the_first_token_is_wanted() -> None:
    jobs = [
        Job(0.0, 10, 5),
        Job(0.0, 10, 5, slo=CALM),
        Job(0.0, 10, 5, slo=URGENT),
        Job(0.0, 10, 5, slo=Slo(deadline=9.0)),
    ]
    assert order(jobs, lambda: EarliestDeadlineFirst(patience=60.0)) == [2, 3, 1, 0]


def test_edf_sheds_nobody() -> None:
    jobs = [Job(0.0, 10, 200, slo=Slo(ttft=0.5)) for _ in range(5)]
    assert all(trip.finish == "length" for trip in serve(jobs, EarliestDeadlineFirst).trips)


def test_slo_sheds_the_hopeless_before_any_work_and_at_once() -> None:
    blocker = Job(0.0, 10, 300)
    run = serve([blocker, Job(0.0, 1000, 5, slo=URGENT)], lambda: SloAware(spare=0.0))
    first = run.trips[1]
    assert first.finish == "length", "the urgent one takes the seat of one that is in no hurry"
    # Two that are equally urgent: the second cannot begin before the first ends.
    run = serve([Job(0.0, 10, 300, slo=URGENT), Job(0.01, 1000, 5, slo=URGENT)], SloAware)
    shed = run.trips[1]
    assert (shed.finish, shed.num_tokens) == ("shed", 0)
    assert shed.output is not None
    assert shed.output.timing is not None
    timing = shed.output.timing
    prefill = CostModel(A100).prefill(1000)
    assert (timing.prefill_s, timing.decode_s) == (0.0, 0.0)
    latest = 2.0 - prefill - A100.base
    assert latest <= timing.total_s <= latest + max(step.seconds for step in run.steps)


def test_slo_sheds_by_the_deadline_of_the_whole_answer_too() -> None:
    jobs = [Job(0.0, 10, 300, slo=URGENT), Job(0.0, 10, 100, slo=Slo(deadline=4.0), expected=100.0)]
    shed = serve(jobs, SloAware).trips[1]
    assert shed.finish == "shed"
    assert shed.total < 4.0 - 99 * A100.base + 0.1


def test_slo_never_sheds_who_was_answered_already() -> None:
    policy, req = _slo(), _request(0, URGENT)
    assert policy.doomed(req, now=10.0)
    req.num_preempted = 1
    assert not policy.doomed(req, now=10.0)


def test_slo_puts_short_work_first_among_the_equally_urgent() -> None:
    jobs = [Job(0.0, 10, 100, slo=CALM, expected=100.0), Job(0.1, 10, 5, slo=CALM, expected=5.0)]
    blocker = Job(0.0, 10, 50, slo=Slo(ttft=16.0))
    assert order([blocker, *jobs], SloAware) == [0, 2, 1]
    assert order([blocker, *jobs], lambda: SloAware(beta=0.0)) == [0, 1, 2]


def test_slo_puts_the_urgent_class_first_whatever_it_costs() -> None:
    policy = _slo()
    heavy, light = _request(0, URGENT, 4000, 500.0), _request(1, CALM)
    light.arrival = -29.0
    assert policy.key(heavy) < policy.key(light)
    assert policy.displaces(heavy, light, 0.0)
    assert not policy.displaces(light, heavy, 0.0)
    assert not policy.displaces(heavy, _request(2, URGENT), 0.0)


def test_those_in_no_hurry_leave_room_for_the_urgent() -> None:
    policy = _slo()
    assert policy.leaves_free(_request(0, CALM)) == pytest.approx(0.15)
    assert policy.leaves_free(_request(0, Slo())) == pytest.approx(0.15)
    assert policy.leaves_free(_request(0, URGENT)) == 0.0


def test_slo_lets_nobody_sit_down_if_a_promised_gap_would_break() -> None:
    policy, seated = _slo(), _request(0, Slo(itl=0.05))
    costs = policy.tools.costs
    light, heavy = Work(decode=1, context=100), Work(decode=100, context=60_000)
    assert costs.step(heavy) > 0.05 > costs.step(light)
    newcomer = _request(1, Slo())
    assert not policy.waits(newcomer, heavy)
    policy.on_admit(seated)
    assert policy.waits(newcomer, heavy)
    assert not policy.waits(newcomer, light)
    policy.on_finish(seated)
    assert not policy.waits(newcomer, heavy)


def test_a_gap_that_cannot_be_kept_keeps_nobody_out() -> None:
    greedy = Job(0.0, 10, 50, slo=Slo(itl=0.001))
    run = serve([greedy] + [Job(0.1, 10, 20) for _ in range(6)], SloAware, seats=8)
    assert max(trip.ttft for trip in run.trips[1:]) < 1.0
