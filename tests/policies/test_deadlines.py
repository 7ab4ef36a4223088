"""edf and slo: deadlines, shedding in time, room for the urgent, and ITL objectives."""

from __future__ import annotations

import math

import pytest

from headway.bench.policy import impossible
from headway.bench.virtual import A100, Job
from headway.control.costs import CostModel
from headway.core.policy import PolicyContext
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
    policy.attach(PolicyContext(CostModel(A100)))
    return policy


def test_edf_orders_by_the_moment_the_first_token_is_wanted() -> None:
    jobs = [
        Job(0.0, 10, 5),
        Job(0.0, 10, 5, slo=CALM),
        Job(0.0, 10, 5, slo=URGENT),
        Job(0.0, 10, 5, slo=Slo(deadline=9.0)),
    ]
    assert order(jobs, lambda: EarliestDeadlineFirst(patience=60.0)) == [2, 3, 1, 0]


def test_edf_sheds_no_request() -> None:
    jobs = [Job(0.0, 10, 200, slo=Slo(ttft=0.5)) for _ in range(5)]
    assert all(record.finish == "length" for record in serve(jobs, EarliestDeadlineFirst).records)


def test_slo_sheds_the_infeasible_before_any_work_and_at_once() -> None:
    blocker = Job(0.0, 10, 300)
    run = serve([blocker, Job(0.0, 1000, 5, slo=URGENT)], lambda: SloAware(spare=0.0))
    first = run.records[1]
    assert first.finish == "length", "the urgent one takes the slot of a loose one"
    # Two that are equally urgent: the second cannot begin before the first ends.
    run = serve([Job(0.0, 10, 300, slo=URGENT), Job(0.01, 1000, 5, slo=URGENT)], SloAware)
    shed = run.records[1]
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
    shed = serve(jobs, SloAware).records[1]
    assert shed.finish == "shed"
    assert shed.total < 4.0 - 99 * A100.base + 0.1


def test_slo_never_sheds_a_preempted_request() -> None:
    policy, req = _slo(), _request(0, URGENT)
    assert policy.is_infeasible(req, now=10.0)
    req.num_preempted = 1
    assert not policy.is_infeasible(req, now=10.0)


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
    assert policy.preempts(heavy, light, 0.0)
    assert not policy.preempts(light, heavy, 0.0)
    assert not policy.preempts(heavy, _request(2, URGENT), 0.0)


def test_an_objective_smaller_than_the_clock_can_tell_has_a_class() -> None:
    req = Request(0, [1], SamplingParams(), arrival=1e5, slo=Slo(ttft=1e-12))
    assert req.arrival + 1e-12 == req.arrival
    assert _slo().rank(req) < _slo().rank(_request(1, Slo(ttft=0.01)))


def test_loose_requests_leave_room_for_urgent_ones() -> None:
    policy = _slo()
    assert policy.leaves_free(_request(0, CALM)) == pytest.approx(0.15)
    assert policy.leaves_free(_request(0, Slo())) == pytest.approx(0.15)
    assert policy.leaves_free(_request(0, URGENT)) == 0.0


def test_slo_admits_no_request_that_would_break_an_itl_objective() -> None:
    policy, running = _slo(), _request(0, Slo(itl=0.05))
    costs = policy.context.costs
    light, heavy = Work(decode=1, context=100), Work(decode=100, context=60_000)
    assert costs.step(heavy) > 0.05 > costs.step(light)
    newcomer = _request(1, Slo())
    assert not policy.waits(newcomer, heavy)
    policy.on_admit(running)
    assert policy.waits(newcomer, heavy)
    assert not policy.waits(newcomer, light)
    policy.on_finish(running)
    assert not policy.waits(newcomer, heavy)


def test_an_itl_that_cannot_be_met_keeps_no_request_out() -> None:
    greedy = Job(0.0, 10, 50, slo=Slo(itl=0.001))
    run = serve([greedy] + [Job(0.1, 10, 20) for _ in range(6)], SloAware, slots=8)
    assert max(record.ttft for record in run.records[1:]) < 1.0


@pytest.mark.parametrize("itl", [0.001, 0.049])
def test_an_itl_that_steps_do_not_allow_is_not_guarded(itl: float) -> None:
    policy, greedy = _slo(), _request(0, Slo(itl=itl))
    heavy = Work(decode=100, context=60_000)
    assert not policy.waits(greedy, heavy), "the queue behind it would wait for an ITL that no request gets"
    greedy.row = 0
    policy.on_admit(greedy)
    assert policy.itl_target() == math.inf
    assert not policy.waits(_request(1, Slo()), heavy)
    policy.on_finish(greedy)
    assert policy.itl_target() == math.inf


def test_an_itl_that_its_own_context_does_not_allow_is_not_guarded() -> None:
    policy = _slo()
    step = policy.context.costs.step(Work(decode=1, context=60_000))
    itl = 0.9 * step
    assert itl > policy._least(), "feasible for a short one"
    for num_prompt, is_guarded in ((10, True), (60_000, False)):
        req = _request(0, Slo(itl=itl), num_prompt)
        req.row = 0
        policy.on_admit(req)
        assert (policy.itl_target() < math.inf) == is_guarded
        policy.on_finish(req)


def test_requests_with_an_infeasible_itl_cost_the_others_at_most_a_tenth() -> None:
    with_itl, without = (impossible.mean_ttft_of_others(0, itl, seconds=300.0) for itl in (impossible.ITL, None))
    assert with_itl <= 1.1 * without


LOOSE, TIGHT = Slo(itl=1.0), Slo(itl=0.05)
LONG = Work(decode=80, context=40_000)  # 51 ms; a step with a tight request may take 45


def _running(policy: SloAware, id: int, slo: Slo) -> Request:
    req = _request(id, slo, num_prompt=500)
    req.tokens.append(7)
    req.row = id
    policy.on_admit(req)
    return req


def test_an_objective_cuts_chunks_until_its_request_ends() -> None:
    policy = _slo()
    assert policy.itl_target() == math.inf
    loose, tight = _running(policy, 0, LOOSE), _running(policy, 1, TIGHT)
    assert policy.itl_target() == pytest.approx(0.9 * 0.05)
    policy.on_finish(tight)
    assert policy.itl_target() == pytest.approx(0.9)
    policy.on_finish(loose)
    assert policy.itl_target() == math.inf
    unlearned = SloAware()
    unlearned.on_admit(tight)
    assert unlearned.itl_target() == math.inf, "what steps cost is not known yet"


def test_no_request_pauses_while_steps_are_short_or_all_objectives_are_equal() -> None:
    policy = _slo()
    _running(policy, 0, TIGHT)
    assert policy.to_pause(1.0, LONG) == (), "only the tight request runs"
    for id in range(1, 80):
        _running(policy, id, Slo(itl=0.08))
    assert list(policy.to_pause(1.0, LONG)) == [], "an ITL that is not twice as long leaves no step to skip"
    policy = _slo()
    for id in range(80):
        _running(policy, id, LOOSE if id else TIGHT)
    assert list(policy.to_pause(1.0, Work(decode=80, context=8000))) == []


def test_loose_requests_pause_in_turn() -> None:
    policy = _slo()
    _running(policy, 0, TIGHT)
    for id in range(1, 80):
        _running(policy, id, LOOSE)
    costs, most, now = policy.context.costs, policy.itl_target(), 10.0
    assert list(policy.to_pause(now, LONG)) == [], "the last run of each is not known yet"
    last_run = dict.fromkeys(range(1, 80), now)
    num_paused = 0
    for _ in range(200):
        now += most
        out = policy.to_pause(now, LONG)
        num_paused += len(out)
        assert 0 < len(out) < 79
        assert costs.step(LONG._replace(decode=80 - len(out), context=40_000 - 501 * len(out))) <= most
        for id in set(last_run) - {req.id for req in out}:
            assert now - last_run[id] <= 1.0
            last_run[id] = now
    assert num_paused > 200 * 10


def test_a_request_paused_as_long_as_it_can_be_resumes_though_the_step_gets_long() -> None:
    policy = _slo()
    _running(policy, 0, TIGHT)
    loose_one = _running(policy, 1, LOOSE)
    heavy = Work(decode=80, context=60_000)
    assert list(policy.to_pause(0.0, heavy)) == []
    assert list(policy.to_pause(0.1, heavy)) == [loose_one]
    assert list(policy.to_pause(0.8, heavy)) == [loose_one]
    assert list(policy.to_pause(0.88, heavy)) == [], "one step later it would be too late"
    assert list(policy.to_pause(0.9, heavy)) == [loose_one]
    loose_one.row = -1
    assert list(policy.to_pause(1.0, heavy)) == [], "it was preempted: no row is left to pause"


def test_prompts_under_way_are_a_reason_to_pause() -> None:
    policy = _slo()
    _running(policy, 0, TIGHT)
    loose_one = _running(policy, 1, LOOSE)
    light = Work(decode=2, context=1000)
    policy.to_pause(0.0, light._replace(tokens=1000, chunks=1))
    assert list(policy.to_pause(0.1, light)) == []
    assert list(policy.to_pause(0.1, light._replace(tokens=1000, chunks=1))) == [loose_one]


def test_the_guard_counts_a_request_that_can_pause_as_a_part_of_a_row() -> None:
    policy = _slo()
    for id in range(79):
        _running(policy, id, LOOSE if id else TIGHT)
    assert not policy.waits(_request(99, LOOSE), LONG), "most of them can pause"
    policy = _slo()
    for id in range(79):
        _running(policy, id, TIGHT)
    assert policy.waits(_request(99, LOOSE), LONG), "none of them can"


def test_a_tight_request_keeps_its_itl_beside_many_loose_ones() -> None:
    jobs = [Job(0.0, 600, 150, slo=LOOSE) for _ in range(80)] + [Job(8.0, 100, 100, slo=Slo(itl=0.06))]
    run = serve(jobs, SloAware, slots=128)
    tight, loose = run.records[-1], run.records[:-1]
    assert tight.is_met
    assert tight.max_itl <= 0.06
    assert all(record.is_met and record.max_itl <= 1.0 for record in loose)
    assert max(record.max_itl for record in loose) > 0.1, "they were paused"
    assert [record.num_tokens for record in run.records] == [150] * 80 + [100]
