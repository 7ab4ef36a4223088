"""Admission and preemption: classes, pins, reservations, peaks, gates, shedding, and the events and metrics of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from headway.control.costs import CostModel, CostWeights
from headway.control.gates import BatchGate
from headway.core.blocked import MOST_MOVES
from headway.core.ledger import KVLedger
from headway.core.phases.preempt import RETRY_AFTER
from headway.core.policy import Key, Policy, PolicyContext
from headway.core.preemption import preempt
from headway.core.request import Account, Request
from headway.core.scheduler import Scheduler
from headway.core.waiting import MOST_EXPIRED
from headway.values.events import Finished, Preempted, PreemptReason
from headway.values.limits import Admission, Limits, PrefillOrder, Victims
from headway.values.params import SamplingParams
from headway.values.states import Finish, State
from headway.values.work import Work
from rig import Rig


class Classes(Policy):
    """Strict classes: a more urgent request preempts."""

    def key(self, req: Request) -> Key:
        return (req.priority, req.arrival)

    def rank(self, req: Request) -> int:
        return req.priority

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        return req.priority < victim.priority


def test_an_urgent_request_takes_a_slot_and_its_owner_comes_back_first() -> None:
    rig = Rig(num_blocks=64, rows=2, tokens=16, policy=Classes())
    low = [rig.add([i] * 4, 12, priority=5) for i in range(2)]
    rig.step()
    rig.step()
    later = rig.add([8] * 4, 4, priority=5)
    high = rig.add([9] * 4, 4, priority=1)
    rig.step()
    assert high.row >= 0
    out = next(req for req in low if req.num_preempted)
    assert later.row < 0
    while high.row >= 0:
        rig.step()
    rig.step()
    assert out.row >= 0
    assert later.row < 0
    rig.drain()
    rig.verify()
    assert [event.reason for event in rig.log.of(Preempted)] == [PreemptReason.PRIORITY]


@pytest.mark.parametrize(("priority", "is_admitted"), [(1, True), (5, False)])
def test_less_urgent_prompts_under_way_keep_no_urgent_request_out(priority: int, is_admitted: bool) -> None:
    rig = Rig(num_blocks=64, rows=8, tokens=8, policy=Classes())
    low = [rig.add([i] * 20, 4, priority=5) for i in range(4)]
    rig.step()
    assert [req.row >= 0 for req in low] == [True] * 4, "four prompts are under way, as many as may be"
    high = rig.add([9] * 4, 4, priority=priority)
    plan = rig.step()
    assert plan is not None
    assert (high.row >= 0) is is_admitted
    assert (plan.chunks[0].row == high.row) is is_admitted, "the first chunk is the more urgent one's"
    rig.drain()
    rig.verify()


def test_equals_never_preempt_each_other_and_no_preemption_is_without_need() -> None:
    rig = Rig(num_blocks=64, rows=2, tokens=16, policy=Classes())
    for i in range(6):
        rig.add([i] * 4, 6, priority=3)
    rig.drain()
    assert not rig.log.of(Preempted)
    rig.add([1] * 4, 3, priority=5)
    rig.step()
    rig.add([2] * 4, 3, priority=1)  # finds the other slot free
    rig.drain()
    assert not rig.log.of(Preempted)


def test_a_closed_gate_preempts_no_request() -> None:
    gate = BatchGate(2)
    rig = Rig(num_blocks=64, rows=4, tokens=16, policy=Classes(), gate=gate)
    rig.add([1] * 4, 9, priority=5)
    rig.step()
    high = rig.add([2] * 4, 3, priority=1)
    rig.step()
    assert high.row < 0
    rig.drain()
    assert not rig.log.of(Preempted)


def test_a_pinned_request_is_never_preempted() -> None:
    rig = Rig(num_blocks=64, rows=1, tokens=16, policy=Classes(), preemptions=0)
    rig.add([1] * 4, 9, priority=5)
    rig.step()
    rig.add([2] * 4, 3, priority=1)
    rig.drain()
    assert not rig.log.of(Preempted)


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_no_request_is_preempted_more_often_than_allowed(host_blocks: int) -> None:
    for seed in range(5):
        rig = Rig(num_blocks=12, block_size=2, rows=8, tokens=24, host_blocks=host_blocks, preemptions=2)
        for i in range(24):
            rig.add([seed + i, i, 3, 4][: 1 + i % 4], 5 + i * 7 % 11)
        rig.drain()
        rig.verify()
        assert rig.log.of(Preempted)
        assert max(req.num_preempted for req in rig.accepted.values()) <= 2
        assert rig.ledger.num_reserved == 0


def test_least_recompute_takes_the_cheapest_victim() -> None:
    rig = Rig(num_blocks=8, block_size=2, rows=2, tokens=16, victims=Victims.LEAST_RECOMPUTE)
    long = rig.add([1] * 9, 5)
    short = rig.add([2] * 3, 9)
    rig.drain()
    rig.verify()
    assert (long.num_preempted, short.num_preempted > 0) == (0, True)
    assert sum(event.num_recomputed for event in rig.log.of(Finished)) == short.num_recomputed > 0


def test_reserved_memory_is_not_given_to_another_request() -> None:
    rig = Rig(num_blocks=8, block_size=2, rows=4, tokens=16, admission=Admission.RESERVE)
    for i in range(6):
        rig.add([i, i + 1], 7)  # four blocks each: two at a time
    most = 0
    while rig.scheduler.has_work or rig.in_flight:
        rig.step()
        most = max(most, rig.scheduler.state.rows.num_running)
        assert rig.ledger.num_reserved <= rig.ledger.pool.available
    rig.verify()
    assert most == 2
    assert not rig.log.of(Preempted)


def test_rows_from_before_reservations_take_no_reserved_block() -> None:
    rig = Rig(num_blocks=8, block_size=2, rows=2, tokens=16)
    rig.add([1, 1], 13)  # seven blocks in the end
    rig.step()
    rig.scheduler.reconfigure(Limits(rows=2, tokens=16, admission=Admission.RESERVE))
    rig.add([2, 2], 9)  # five, and they are reserved
    while rig.scheduler.has_work or rig.in_flight:
        rig.step()
        assert rig.ledger.num_reserved <= rig.ledger.pool.available
    rig.verify()


def test_a_request_whose_kv_was_loaded_reserves_too() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=4, tokens=16, admission=Admission.RESERVE)
    first, second = (rig.add([i, i], 7, state=State.LOADING) for i in (1, 2))  # four blocks each in the end
    for req in (first, second):
        rig.load(req.id, 2)
    rig.drain()
    rig.verify()
    assert not rig.log.of(Preempted)


@pytest.mark.parametrize("num_prompt", [4, 5])
def test_several_answers_to_one_prompt_reserve_each(num_prompt: int) -> None:
    rig = Rig(num_blocks=10, block_size=2, rows=4, tokens=16, admission=Admission.RESERVE)
    leader = rig.add([1] * num_prompt, 9)
    for seed in (1, 2):
        rig.add([1] * num_prompt, 9, seed=seed, parent=leader.id)
    while rig.scheduler.has_work or rig.in_flight:
        rig.step()
        assert rig.ledger.num_reserved <= rig.ledger.pool.available
    rig.verify()
    assert not rig.log.of(Preempted)


def test_rejected_drafts_give_reserved_blocks_back_to_their_request() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=4, tokens=16, admission=Admission.RESERVE)
    first = rig.add([1, 2], 9, needs_feedback=True)  # five blocks in the end
    rig.step()
    second = rig.add([3, 4], 3)  # two blocks, and one is not reserved
    while first.row >= 0:
        first.draft = (51, 51, 51)  # two blocks more, all of it rejected
        rig.step()
        assert rig.ledger.num_reserved <= rig.ledger.pool.available
        assert first.row < 0 or len(first.table) + rig.ledger.num_reserved == 5
        assert second.row < 0 or first.row < 0
    rig.drain()
    rig.verify()
    assert not rig.log.of(Preempted)


def test_peak_admission_counts_predicted_answers() -> None:
    def run(admission: Admission) -> Rig:
        rig = Rig(num_blocks=16, block_size=2, rows=8, tokens=16, admission=admission)
        for i in range(12):
            rig.add([i, i + 1], 12, expected=12.0, ceiling=12.0)
        rig.drain()
        rig.verify()
        return rig

    hopeful, careful = run(Admission.OPTIMISTIC), run(Admission.PEAK)
    assert len(hopeful.log.of(Preempted)) > 0
    assert len(careful.log.of(Preempted)) == 0


def test_peak_admission_learns_from_preemptions_that_should_not_have_been() -> None:
    rig = Rig(num_blocks=16, block_size=2, rows=8, tokens=16, admission=Admission.PEAK)
    for i in range(12):
        rig.add([i, i + 1], 12, expected=1.0)  # far too little
    rig.drain()
    assert rig.log.of(Preempted)
    assert rig.scheduler.state.length_factor > 1.0


def test_a_static_batch_ends_together() -> None:
    rig = Rig(num_blocks=64, rows=2, tokens=16, gate=BatchGate(2))
    for count in (2, 6, 3):
        rig.add([count] * 3, count)
    rig.step()
    rig.step()
    assert not rig.outcomes, "the first is done and waits for the second"
    for _ in range(4):
        rig.step()
    rig.step()
    assert set(rig.outcomes) == {0, 1}
    rig.drain()
    rig.verify()


def test_a_dynamic_batch_leaves_when_full_or_when_its_oldest_has_waited() -> None:
    gate = BatchGate(4, window=2.0)
    assert gate.num_slots(1.0, 0, 3, 0.0) == 0
    assert gate.num_slots(1.0, 0, 4, 0.0) == 4
    assert gate.num_slots(2.0, 0, 1, 0.0) == 4
    assert gate.num_slots(9.0, 1, 9, 0.0) == 0


class Deadlines(Policy):
    def latest_start(self, req: Request) -> float:
        return req.arrival + 3.0 if req.priority == 0 else math.inf


def test_infeasible_requests_are_shed_wherever_they_wait() -> None:
    rig = Rig(num_blocks=64, rows=1, tokens=16, policy=Deadlines())
    rig.add([1] * 4, 30, priority=1)
    waiting = [rig.add([i] * 4, 4) for i in range(3)]
    rig.add([7] * 4, 3, priority=1)
    for _ in range(8):
        rig.step()
    assert [rig.outcomes.get(req.id) for req in waiting] == [Finish.SHED] * 3
    assert all(req.num_scheduled == 0 for req in waiting)
    rig.drain()
    assert rig.outcomes[4] is Finish.LENGTH


class LateAtTheHead(Policy):
    def latest_start(self, req: Request) -> float:
        return 5.0 if req.priority == 0 else math.inf

    def is_infeasible(self, req: Request, now: float) -> bool:
        return now > self.latest_start(req)


def test_a_step_beside_running_rows_sheds_a_bounded_number() -> None:
    rig = Rig(num_blocks=64, rows=2, tokens=16, policy=LateAtTheHead())
    rig.add([1] * 4, 40, priority=1)
    rig.add([2] * 4, 6, priority=1)  # its slot is free when all others have expired
    waiting = [rig.add([i] * 4, 4) for i in range(1000, 4000)]
    num_shed = [0]
    for _ in range(30):
        rig.step()
        num_shed.append(sum(req.finish is Finish.SHED for req in waiting))
    assert max(later - sooner for sooner, later in pairwise(num_shed)) <= MOST_EXPIRED + MOST_MOVES
    assert num_shed[-1] == len(waiting)
    assert 0 not in rig.outcomes, "it ran beside them"
    rig.drain()


def test_a_follower_whose_leader_is_gone_is_shed_once() -> None:
    rig = Rig(num_blocks=64, rows=1, tokens=16, policy=Deadlines())
    rig.add([1] * 4, 30, priority=1)
    leader = rig.add([2] * 4, 4)
    follower = rig.add([2] * 4, 4, parent=leader.id)
    rig.abort(leader.id)
    for _ in range(8):
        rig.step()
    assert rig.outcomes[follower.id] is Finish.SHED
    rig.drain()


def test_a_request_that_ran_is_never_shed() -> None:
    rig = Rig(num_blocks=64, rows=1, tokens=16, policy=Deadlines())
    ran = rig.add([1] * 4, 12)
    rig.step()
    preempt(rig.scheduler.state, ran)
    for _ in range(9):
        rig.step()
    rig.drain()
    rig.verify()
    assert rig.outcomes[ran.id] is Finish.LENGTH


class SmallestFirst(Policy):
    backfill_depth = 3

    def key(self, req: Request) -> Key:
        return (req.arrival,)


def test_backfill_tries_requests_behind_the_head_and_keeps_their_order() -> None:
    rig = Rig(num_blocks=8, block_size=2, rows=4, tokens=32, policy=SmallestFirst(), spare=0)
    rig.add([1] * 8, 6)
    rig.step()
    big = rig.add([2] * 12, 2)
    small = rig.add([3] * 2, 2)
    rig.step()
    assert big.row < 0
    assert small.row >= 0
    assert len(rig.scheduler.state.waiting) == 1
    rig.drain()
    rig.verify()


class TriedClasses(SmallestFirst):
    def rank(self, req: Request) -> int:
        return req.priority


def test_backfill_overtakes_no_preempted_request_of_the_same_class() -> None:
    rig = Rig(num_blocks=8, block_size=2, rows=4, tokens=32, policy=TriedClasses())
    rig.add([1] * 6, 8, priority=0)
    back = rig.add([2] * 6, 4, priority=1)
    rig.step()
    preempt(rig.scheduler.state, back)
    rig.add([3] * 12, 2, priority=0)  # the next, and too large
    same = rig.add([4] * 2, 2, priority=1)
    above = rig.add([5] * 2, 2, priority=0)
    rig.step()
    assert above.row >= 0
    assert same.row < 0
    rig.drain()
    rig.verify()


class Returning(Policy):
    resumes_first = False

    def key(self, req: Request) -> Key:
        return (-req.arrival,)


@pytest.mark.parametrize("reason", PreemptReason)
def test_a_request_preempted_by_priority_may_wait_by_key_one_preempted_for_memory_never(reason: PreemptReason) -> None:
    rig = Rig(num_blocks=64, rows=1, policy=Returning())
    first = rig.add([1, 2, 3], 6)
    rig.step()
    second = rig.add([4, 5, 6], 3)
    preempt(rig.scheduler.state, first, reason)
    rig.step()
    assert (first.row >= 0, second.row >= 0) == (reason is PreemptReason.MEMORY, reason is PreemptReason.PRIORITY)
    rig.drain()
    rig.verify()


def test_an_aborted_request_among_the_preempted_is_gone() -> None:
    rig = Rig(num_blocks=64, rows=2)
    first, second = rig.add([1, 2, 3], 6), rig.add([3, 4, 5], 6)
    rig.step()
    for req in (first, second):
        preempt(rig.scheduler.state, req)
    rig.abort(first.id)
    rig.step()
    assert second.row >= 0
    rig.drain()


class Guarded(Policy):
    def waits(self, req: Request, work: Work) -> bool:
        return work.decode > 2


def test_a_policy_may_keep_the_next_waiting_for_the_sake_of_the_running() -> None:
    rig = Rig(num_blocks=64, rows=8, tokens=32, policy=Guarded())
    for i in range(5):
        rig.add([i] * 3, 5)
    most = 0
    while rig.scheduler.has_work or rig.in_flight:
        rig.step()
        most = max(most, rig.scheduler.num_running)
    assert most == 2
    rig.verify()


class Halting:
    def tokens(self, work: Work, start: int, itl_target: float) -> int:
        return 4 if start else 6

    def has_slot(self, work: Work) -> bool:
        return work.decode <= 3


def test_a_pacer_bounds_chunks_and_slots() -> None:
    rig = Rig(num_blocks=64, rows=8, tokens=32, pacer=Halting())
    for i in range(6):
        rig.add([i] * 9, 5)
    most = 0
    while rig.scheduler.has_work or rig.in_flight:
        plan = rig.step()
        if plan is not None:
            assert sum(chunk.count for chunk in plan.chunks) <= 6
        most = max(most, rig.scheduler.num_running)
    assert most == 3
    rig.verify()


class ByStart:
    """A chunk deep in a prompt costs more: 40 tokens at its beginning, 5 after it, and nothing beside another one."""

    def tokens(self, work: Work, start: int, itl_target: float) -> int:
        return 0 if work.tokens else 5 if start else 40

    def has_slot(self, work: Work) -> bool:
        return True


def test_a_chunk_is_bounded_by_where_it_begins() -> None:
    """Every fourth chunk is the oldest's, which is long and under way: it gets 5, not the 40 of a short newcomer."""
    rig = Rig(num_blocks=256, rows=16, tokens=64, pacer=ByStart())
    rig.add([1] * 200, 5)
    seen = []
    for i in range(12):
        rig.add([i] * 9, 30)
        plan = rig.step()
        assert plan is not None
        seen += [(chunk.start, chunk.count) for chunk in plan.chunks]
    deep = [count for start, count in seen if start]
    assert deep
    assert max(deep) == 5
    rig.verify()


@pytest.mark.parametrize(("order", "first"), [(PrefillOrder.SHORTEST, 1), (PrefillOrder.ARRIVAL, 0)])
def test_prompts_under_way_go_on_by_what_is_left_or_by_arrival(order: PrefillOrder, first: int) -> None:
    rig = Rig(num_blocks=200, rows=4, tokens=8, prefill=order)
    rig.add(list(range(60)), 2)
    rig.step()
    rig.add(list(range(100, 108)), 2)
    rig.drain()
    rig.verify()
    done = [id for id in rig.outcomes]
    assert done[0] == first


def test_classes_come_before_remaining_tokens_in_the_order_of_chunks() -> None:
    rig = Rig(num_blocks=200, rows=4, tokens=8, policy=Classes())
    rig.add(list(range(40)), 2, priority=5)
    rig.step()
    urgent = rig.add(list(range(100, 160)), 2, priority=1)
    for _ in range(9):
        rig.step()
    assert urgent.num_output > 0
    assert rig.accepted[0].num_output == 0
    rig.drain()
    rig.verify()


def test_limits_may_change_while_it_runs() -> None:
    rig = Rig(num_blocks=64, rows=4, tokens=16)
    for i in range(8):
        rig.add([i] * 3, 6)
    rig.step()
    assert rig.scheduler.num_running == 4
    rig.scheduler.reconfigure(Limits(rows=2, tokens=16))
    while rig.scheduler.num_running > 2:
        rig.step()
    for _ in range(4):
        rig.step()
        assert rig.scheduler.num_running <= 2
    rig.drain()
    rig.verify()


def test_swapping_is_left_where_computing_is_cheaper() -> None:
    def swaps(weights: CostWeights) -> list[bool]:
        ledger = KVLedger(8, 2, host_blocks=16)
        scheduler = Scheduler(ledger, Limits(2, 8, swaps=True), Policy(), costs=CostModel(weights))
        req = Request(0, [1, 2, 3], SamplingParams(max_tokens=4))
        scheduler.add(req)
        assert scheduler.schedule(0.0) is not None
        req.num_computed = 3
        preempt(scheduler.state, req)
        return [bool(req.host_table)]

    assert swaps(CostWeights(base=1.0, tokens=1.0, copies=0.01)) == [True]
    assert swaps(CostWeights(base=1.0, tokens=0.01, copies=1.0)) == [False]


def test_a_policy_context_gives_costs_and_cached_tokens() -> None:
    asked: list[int] = []
    num_tokens: list[int] = []

    class Curious(Policy):
        def key(self, req: Request) -> Key:
            asked.append(self.context.num_cached(req))
            return (self.context.request_cost(req),)

        def victim_key(self, req: Request) -> Key:
            num_tokens.append(self.context.num_computed(req))
            return (num_tokens[-1],)

        def preempts(self, req: Request, victim: Request, now: float) -> bool:
            return False

    rig = Rig(num_blocks=16, block_size=4, rows=4, policy=Curious(share_every=5, boost_after=9.0))
    rig.add(list(range(8)), 3)
    plan = rig.scheduler.schedule(0.0)
    assert plan is not None
    assert plan.work == Work(tokens=8, pairs=64, chunks=1)
    rig.executor.submit(plan)
    rig.in_flight.append(plan)
    preempt(rig.scheduler.state, rig.accepted[0])
    rig.drain()
    rig.add(list(range(8)), 3)
    rig.drain()
    for _ in range(5):
        rig.add([99] * 3, 3)
    rig.drain()
    assert 3 in num_tokens
    assert asked[0] == 0
    assert 8 in asked
    fixed = PolicyContext(CostModel(CostWeights(base=1.0, tokens=0.5)))
    req = Request(0, [1] * 10, SamplingParams(max_tokens=4), expected=4.0)
    assert fixed.request_cost(req) == pytest.approx(5.0 + 4.0)
    assert PolicyContext().request_cost(req) == 10 + 16
    assert rig.scheduler.state.live == {}


def test_many_are_preempted_for_one_but_not_all_in_one_step() -> None:
    rig = Rig(num_blocks=24, block_size=2, rows=12, tokens=48, policy=Classes())
    for i in range(12):
        rig.add([i, i], 2, priority=5)
    rig.step()
    rig.add([9] * 44, 2, priority=1)
    rig.drain()
    rig.verify()


def test_the_defaults_decide_nothing() -> None:
    policy, req = Policy(), Request(0, [1], SamplingParams())
    policy.on_tokens(Account("", ""), 0, 0)
    assert not policy.preempts(req, req, 0.0)
    assert policy.victim_key(req) == ()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_static_batch_is_reported_before_the_next_one_begins(depth: int) -> None:
    rig = Rig(rows=2, depth=depth, gate=BatchGate(2), num_blocks=32)
    requests = [rig.add([i] * 3, 3) for i in range(6)]
    while requests[2].row < 0:
        rig.step()
    assert set(rig.outcomes) == {0, 1}
    rig.drain()
    rig.verify()


def test_a_request_that_never_joined_a_static_batch_is_reported_though_the_batch_runs() -> None:
    rig = Rig(rows=2, gate=BatchGate(2), num_blocks=32, policy=Deadlines())
    rig.add([1] * 3, 12, priority=1)
    rig.add([2] * 3, 2, priority=1)
    rig.step()
    shed = rig.add([3] * 3, 2)
    while rig.now <= shed.arrival + 4.0:
        rig.step()
    assert rig.outcomes == {shed.id: Finish.SHED}  # the second has ended as well and waits for the first
    rig.drain()
    rig.verify()


def test_a_static_batch_has_not_ended_while_a_preempted_request_of_it_waits() -> None:
    rig = Rig(rows=2, gate=BatchGate(2), num_blocks=32)
    short, long = rig.add([1] * 3, 3), rig.add([2] * 3, 6)
    rig.step()
    preempt(rig.scheduler.state, long)
    while short.finish is None:
        rig.step()
    assert not rig.outcomes
    while long.finish is None:
        rig.step()
    rig.step()
    assert set(rig.outcomes) == {short.id, long.id}


def test_a_step_that_takes_two_attempts_counts_once_for_peak_admission() -> None:
    rig = Rig(num_blocks=4, admission=Admission.PEAK)
    rig.ledger.pool.take(3)  # blocks that no request ever gives back
    rig.add([1] * 10, 1)
    rig.add([2] * 3, 1)
    assert rig.scheduler.schedule(1.0) is not None
    assert rig.scheduler.state.length_factor == 0.9975


def test_the_victim_is_one_that_the_policy_lets_be_preempted() -> None:
    class Spares(Classes):
        def preempts(self, req: Request, victim: Request, now: float) -> bool:
            return super().preempts(req, victim, now) and victim.tenant != "spared"

    rig = Rig(num_blocks=64, rows=2, tokens=16, policy=Spares())
    other = rig.add([1] * 4, 12, priority=5)
    spared = rig.add([2] * 4, 12, priority=5, tenant="spared")  # came last: it would be the first victim
    rig.step()
    rig.step()
    high = rig.add([9] * 4, 4, priority=1)
    rig.step()
    assert high.row >= 0
    assert (other.num_preempted, spared.num_preempted) == (1, 0)
    rig.drain()
    rig.verify()


def test_a_head_without_a_victim_looks_for_one_again_but_not_in_every_step() -> None:
    asked: list[int] = []

    class Later(Classes):
        def preempts(self, req: Request, victim: Request, now: float) -> bool:
            asked.append(rig.scheduler.state.step)
            return now >= 20.0

    rig = Rig(num_blocks=64, rows=2, tokens=16, policy=Later())
    for i in range(2):
        rig.add([i] * 4, 60, priority=5)
    rig.step()
    first = rig.scheduler.state.step
    head = rig.add([9] * 4, 4, priority=1)
    while head.row < 0:
        rig.step()
    assert rig.now <= 20.0 + RETRY_AFTER
    steps = sorted(set(asked))
    assert steps[0] == first, "a new head looks at once"
    assert len(steps) <= 2 + (rig.now - first) / RETRY_AFTER
    rig.drain()
    rig.verify()


def test_where_memory_is_short_urgent_prompts_are_placed_before_older_ones() -> None:
    rig = Rig(num_blocks=7, block_size=4, rows=4, tokens=64, policy=Classes(), admission=Admission.OPTIMISTIC)
    older = rig.add([1] * 7, 12, priority=5, needs_feedback=True)
    rig.step()
    urgent = rig.add([2] * 8, 12, priority=1, needs_feedback=True)  # from now on both need a block in the same steps
    rig.drain()
    rig.verify()
    assert urgent.num_preempted == 0
    assert older.num_preempted > 0


@pytest.mark.parametrize(
    ("share", "is_admitted"), [(math.nan, True), (-1.0, True), (0.5, True), (0.97, False), (7.0, False)]
)
def test_the_share_that_a_policy_leaves_free_is_one_of_the_memory(share: float, is_admitted: bool) -> None:
    class Sparing(Policy):
        def leaves_free(self, req: Request) -> float:
            return share

    rig = Rig(num_blocks=16, block_size=4, rows=4, policy=Sparing())
    rig.add([1] * 4, 8)
    second = rig.add([2] * 4, 8)
    rig.step()
    assert (second.row >= 0) is is_admitted
    rig.drain()
    rig.verify()
