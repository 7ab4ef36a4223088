"""Many requests that share a prefix under computation: bounded work per step, one wake-up, new keys once cached."""

from __future__ import annotations

import math

import pytest

from headway import plugins
from headway.control.gates import BatchGate
from headway.core.policy import Key, Policy
from headway.core.preemption import preempt
from headway.core.queue import RankQueue
from headway.core.request import Request
from headway.policies.hrrn import HighestRatioNext
from headway.policies.lpm import LongestPrefixMatch, PrefixQueue
from headway.policies.priority import Priority
from headway.policies.sjf import ShortestJobFirst
from headway.policies.srpt import ShortestRemaining
from headway.values.events import Admitted
from headway.values.params import Slo
from headway.values.states import Finish, WaitReason
from rig import Rig

PREFIX = list(range(64))
MOST_MOVES = 600  # queue operations in one step, whatever waits


class CountingQueue(RankQueue):
    """Counts what a step does to the queue."""

    num_calls = 0

    def push(self, req: Request) -> None:
        self.num_calls += 1
        super().push(req)

    def peek(self, now: float) -> Request | None:
        self.num_calls += 1
        return super().peek(now)

    def remove(self, id: int) -> bool:
        self.num_calls += 1
        return super().remove(id)


class Counting(Policy):
    def queue(self) -> CountingQueue:
        self.made = CountingQueue(self.key)
        return self.made


def _rig(**shape) -> Rig:
    return Rig(**{"num_blocks": 6000, "block_size": 16, "rows": 8, "tokens": 32, "chunk": 16, **shape})


def test_a_step_does_bounded_work_when_thousands_wait_for_one_prefix() -> None:
    policy = Counting()
    rig = _rig(policy=policy)
    for i in range(3000):
        rig.add([*PREFIX, i], 1)
    most = 0
    for _ in range(12):  # blocked, computed, woken
        before = policy.made.num_calls
        rig.now += 1.0
        plan = rig.scheduler.schedule(rig.now)
        assert plan is not None
        rig.executor.submit(plan)
        rig.in_flight.append(plan)
        rig.collect()
        most = max(most, policy.made.num_calls - before)
    assert most <= MOST_MOVES


@pytest.mark.parametrize("name", ["fcfs", "sjf", "srpt", "hrrn", "lpm", "priority", "edf", "slo", "fair", "mlfq"])
def test_an_unrelated_request_does_not_wait_behind_thousands_that_share_a_prefix(name: str) -> None:
    rig = _rig(rows=64, tokens=64, policy=plugins.load("policies", name)())
    for i in range(1500):
        rig.add([*PREFIX, i], 1000, slo=Slo(ttft=40.0))
    other = rig.add([5000, 5001], 1000, expected=999.0, priority=3000, slo=Slo(ttft=3000.0))
    for _ in range(4):
        plan = rig.scheduler.schedule(0.01)
        if other.row >= 0:
            break
        assert plan is not None
        rig.executor.submit(plan)
        rig.scheduler.commit(plan, rig.executor.collect())
    assert other.row >= 0


def test_all_requests_blocked_on_one_prefix_are_served_and_compute_it_once() -> None:
    rig = _rig(rows=4)
    for i in range(700):
        rig.add([*PREFIX, i], 1)
    rig.drain(most=5000)
    rig.verify()
    prefill = sum(chunk.count for plan in rig.plans for chunk in plan.chunks)
    assert prefill <= len(PREFIX) + 700 + 3 * 16


def test_requests_behind_blocked_ones_are_admitted() -> None:
    rig = _rig(rows=3)
    for i in range(50):
        rig.add([*PREFIX, i], 1)
    other = rig.add([5000, 5001], 1)
    rig.step()
    assert other.row >= 0 or other.num_output
    rig.drain()
    rig.verify()


def test_a_request_blocks_on_the_last_block_it_shares() -> None:
    rig = _rig(rows=3)
    rig.add(PREFIX, 1)
    short = rig.add([*PREFIX[:32], 9, 9], 1)
    long = rig.add([*PREFIX, 7], 1)
    rig.step()
    rig.step()
    assert short.state.value == "waiting"
    rig.step()
    assert short.num_cached == 32  # woken when its two blocks are published, before the prompt is done
    assert long.state.value == "waiting"
    rig.drain()
    rig.verify()


def test_small_groups_are_not_kept_behind_a_large_one() -> None:
    rig = _rig(rows=700, tokens=700)
    rig.add(PREFIX, 1)
    twin = [900 + token for token in PREFIX]
    rig.add(twin, 1)
    rig.step()
    for i in range(600):
        rig.add([*PREFIX, i], 8)
    late = rig.add([*twin, 1], 1)
    while rig.accepted[1].row >= 0:
        assert late.row < 0
        rig.step()
    rig.step()
    assert late.row >= 0 or late.num_output
    rig.drain(most=5000)
    rig.verify()


def test_heads_of_many_accounts_that_share_a_prefix_are_blocked_a_few_per_step() -> None:
    rig = _rig(rows=8, policy=LongestPrefixMatch())
    for i in range(100):
        rig.add([*PREFIX, i], 1, lane=f"lane{i}")
    other = rig.add([5000, 5001], 2)
    rig.step()
    assert other.row < 0
    rig.step()
    assert other.row >= 0
    rig.drain()
    rig.verify()


class Patient(Policy):
    """A request of priority 1 must start within three seconds."""

    def latest_start(self, req: Request) -> float:
        return req.arrival + 3.0 if req.priority else math.inf


def test_what_is_blocked_behind_a_queued_request_goes_on_in_the_step_that_sheds_it() -> None:
    rig = _rig(policy=Patient())
    first, second = rig.add(PREFIX, 1, priority=1), rig.add(PREFIX, 1)
    rig.now = 9.0
    assert rig.step() is not None
    assert first.finish is Finish.SHED
    assert second.num_output or second.row >= 0
    rig.drain()


def test_what_is_blocked_behind_a_queued_request_waits_for_what_that_waits_for() -> None:
    rig = _rig(rows=1)
    rig.add([7], 3)
    rig.add(PREFIX, 1)
    last = rig.add(PREFIX, 1)
    rig.drain()
    rig.verify()
    assert last.waited[WaitReason.SLOTS].steps == 3
    assert last.waited[WaitReason.PREFIX].steps == 4  # chunks of 16 tokens


class Odd(Policy):
    """Ranks that its keys contradict."""

    def rank(self, req: Request) -> int:
        return req.priority


def test_a_request_is_not_blocked_behind_a_less_urgent_one_whatever_their_keys() -> None:
    rig = _rig(rows=1, policy=Odd())
    rig.add([7], 3)
    calm, urgent = rig.add(PREFIX, 1, priority=5), rig.add(PREFIX, 1, priority=0)
    rig.step()
    assert {calm.id, urgent.id} == {req.id for req in rig.scheduler.state.waiting.queue.requests()}
    rig.drain()
    rig.verify()


class LastFirst(Odd):
    """The newest first, though it may be less urgent than what it overtakes."""

    keeps_arrival_order = False

    def key(self, req: Request) -> Key:
        return (-req.arrival,)


def test_an_overtaken_request_is_not_blocked_behind_a_less_urgent_one() -> None:
    rig = _rig(rows=1, policy=LastFirst())
    rig.add([7], 3)
    rig.step()
    urgent, calm = rig.add(PREFIX, 1, priority=0), rig.add(PREFIX, 1, priority=5)
    assert {calm.id, urgent.id} == {req.id for req in rig.scheduler.state.waiting.queue.requests()}
    rig.drain()
    rig.verify()


def test_without_prefix_caching_a_twin_starts_at_once() -> None:
    rig = _rig(caching=False)
    rig.add(PREFIX, 2)
    twin = rig.add(PREFIX, 2)
    rig.step()
    assert twin.row >= 0
    rig.drain()
    rig.verify()


def test_a_blocked_request_that_is_aborted_leaves_nothing() -> None:
    rig = _rig()
    rig.add(PREFIX, 1)
    rig.step()
    blocked = [rig.add([*PREFIX, i], 1) for i in range(300)]
    for req in blocked:
        rig.abort(req.id)
    assert rig.scheduler.num_waiting == 0
    rig.drain()
    rig.verify()


@pytest.mark.parametrize("kind", [ShortestJobFirst, ShortestRemaining, HighestRatioNext, LongestPrefixMatch])
def test_identical_requests_are_admitted_by_arrival_though_the_prefix_was_cached_between(kind) -> None:
    rig = _rig(rows=1, tokens=64, chunk=None, policy=kind(share_every=0) if kind is not ShortestRemaining else kind())
    rig.scheduler.state.policy.share_every = 0
    early = [rig.add([*PREFIX, 1], 2) for _ in range(8)]
    for _ in range(4):
        rig.step()
    late = [rig.add([*PREFIX, 1], 2) for _ in range(8)]
    order: list[int] = []
    while rig.scheduler.has_work or rig.in_flight:
        rig.step()
        order += [req.id for req in early + late if req.row >= 0 and req.id not in order]
    assert order == sorted(order)


@pytest.mark.parametrize("kind", [ShortestJobFirst, LongestPrefixMatch])
def test_a_queued_request_that_is_aborted_is_not_keyed_anew(kind) -> None:
    rig = _rig(rows=1, tokens=64, chunk=None, policy=kind())
    first, second, third = (rig.add([*PREFIX, i], 2, lane=f"lane{i}") for i in range(3))
    other = rig.add([9000 + token for token in PREFIX], 2)
    rig.abort(other.id)  # its block is never published
    plan = rig.scheduler.schedule(0.5)
    assert plan is not None
    assert first.row >= 0
    rig.executor.submit(plan)
    rig.in_flight.append(plan)
    rig.collect()  # the block that the others need is published: their keys are stale
    rig.abort(second.id)
    rig.drain()
    rig.verify()
    assert third.num_cached == len(PREFIX)


def test_more_keys_than_a_step_renews_go_stale_at_once() -> None:
    rig = _rig(rows=1, tokens=64, chunk=None, policy=ShortestJobFirst(share_every=0))
    for i in range(200):
        rig.add([*PREFIX, i % 7], 1)
    rig.drain(most=5000)
    rig.verify()


class CountingPrefixQueue(PrefixQueue):
    num_updates = 0

    def update(self, req: Request) -> None:
        self.num_updates += 1
        super().update(req)


class CountingPrefixMatch(LongestPrefixMatch):
    def queue(self) -> CountingPrefixQueue:
        self._queue = self.made = CountingPrefixQueue(self.context.num_cached, self.quantum, self.share_every)
        return self.made


def test_a_step_renews_a_bounded_number_of_keys() -> None:
    policy = CountingPrefixMatch(share_every=0)
    rig = _rig(rows=1, tokens=64, chunk=None, policy=policy)
    first = rig.add([*PREFIX, 49], 2, salt="shared")
    for i in range(200):  # a tenant holds back requests of its own alone, so all of them are queued
        rig.add([*PREFIX, i % 7], 1, tenant=f"tenant{i}", salt="shared")
    counts = []
    while rig.scheduler.has_work or rig.in_flight:
        before = policy.made.num_updates
        rig.step()
        counts.append(policy.made.num_updates - before)
    assert sum(counts) >= 150, "their keys were renewed"
    assert max(counts) <= 64, "a bounded number in a step"
    rig.verify()
    assert first.num_output == 2


def test_an_urgent_request_does_not_wait_for_a_less_urgent_row() -> None:
    rig = _rig(rows=3, policy=Priority())
    rig.add(PREFIX, 1, priority=5)
    rig.step()
    urgent, calm = rig.add(PREFIX, 1, priority=0), rig.add(PREFIX, 1, priority=5)
    rig.step()
    assert urgent.row >= 0
    assert calm.row < 0
    rig.drain()
    rig.verify()


def test_a_group_is_not_woken_by_the_check_of_an_earlier_one() -> None:
    rig = _rig(rows=3, tokens=8, chunk=8)
    first = rig.add([*range(80)], 1)
    rig.step()
    waiters = [rig.add([*range(80)], 1) for _ in range(2)]
    rig.step()
    rig.abort(first.id)  # one of the waiters computes the prefix now, the other one blocks again
    rig.drain()
    rig.verify()
    assert sorted(req.num_cached for req in waiters)[-1] == 79


def test_a_stalled_prefix_is_computed_once_more_and_not_by_all() -> None:
    rig = _rig(rows=8, tokens=3, chunk=1)  # a block takes sixteen steps
    for _ in range(6):
        rig.add(PREFIX[:40], 1)
    for _ in range(8):
        rig.step()
    assert rig.scheduler.num_waiting == 4
    rig.drain()
    rig.verify()


def test_output_that_is_published_at_the_end_renews_keys() -> None:
    rig = Rig(num_blocks=64, block_size=4, rows=1, tokens=64, policy=ShortestJobFirst(share_every=0))
    first = rig.add([1, 2, 3, 4], 9)
    answer = rig.expected(first.id)
    rig.step()
    other = rig.add([50 + i for i in range(8)], 2, expected=2.0)
    turn = rig.add([1, 2, 3, 4, *answer[:8], 7], 2, expected=2.0)
    rig.drain()
    rig.verify()
    order = [event.id for event in rig.log.of(Admitted)]
    assert order.index(turn.id) < order.index(other.id)


def test_draft_tokens_given_to_a_waiting_request_are_forgotten_when_it_joins() -> None:
    rig = Rig(num_blocks=6, block_size=2, rows=2, tokens=16)
    req = rig.add([1, 2, 3], 4, needs_feedback=True)
    req.draft = (1,) * 8
    rig.drain()
    rig.verify()


def test_twins_that_came_at_the_same_time_go_by_id() -> None:
    rig = _rig(rows=1)
    first, second = rig.add(PREFIX, 1), rig.add(PREFIX, 1)
    rig.step()
    rig.abort(first.id)
    third = rig.add(PREFIX, 1)
    third.arrival = second.arrival
    rig.drain()
    rig.verify()
    order = [event.id for event in rig.log.of(Admitted)]
    assert order.index(second.id) < order.index(third.id)


def test_a_request_behind_a_head_that_does_not_fit_is_blocked_if_a_row_computes_its_prefix() -> None:
    rig = _rig(rows=4, num_blocks=10, tokens=16, policy=ShortestJobFirst(share_every=0))
    rig.add(PREFIX, 40, expected=1.0)  # four blocks in four steps, and more for its answer
    rig.step()
    rig.add([5000 + i for i in range(112)], 1, expected=1.0, lane="other")  # cheap to the end, and seven blocks
    twin = rig.add([*PREFIX[:32], *range(900, 932)], 40, expected=40.0, lane="other")
    rig.step()
    assert twin.row < 0
    rig.drain()
    rig.verify()
    assert twin.num_cached == 32


def test_requests_that_wake_are_admitted_in_the_policys_order_whatever_their_prefix() -> None:
    rig = Rig(num_blocks=20_000, block_size=4, rows=100, tokens=4000)
    families = [[family, *range(100, 115)] for family in range(60)]
    old = [rig.add([*families[0], i], 4) for i in range(200)]
    for i in range(20 * 59):
        rig.add([*families[1 + i % 59], i], 4)
    while not all(req.epoch or req.row >= 0 for req in old):
        rig.step()
    assert max(req.num_overtaken for req in old) < len(families)  # by the first of each prefix, which computes it


@pytest.mark.parametrize("name", ["sjf", "srpt", "ltr"])
@pytest.mark.parametrize("shared", [True, False])
def test_newer_requests_with_the_same_prefix_do_not_starve_an_older_one(name: str, shared: bool) -> None:
    rig = Rig(num_blocks=4000, block_size=4, rows=1, tokens=64, policy=plugins.load("policies", name)())
    prefix = list(range(40))
    oldest = rig.add([*prefix, 1], 20, expected=20.0)
    for i in range(200):
        rig.add([1000 + i], 2, expected=2.0)
        if i % 8 == 7:  # a little shorter than those before it
            rig.add([*(prefix if shared else [2000 + i, *prefix[1:]]), 2], 20, expected=19.9 - 0.01 * i)
        rig.step()
        if oldest.row >= 0:
            break
    assert oldest.row >= 0


def test_a_prefix_that_is_published_fills_all_free_slots_at_once() -> None:
    rig = Rig(num_blocks=30_000, block_size=4, rows=512, tokens=16_384)
    for i in range(600):
        rig.add([*range(16), i], 40)
    rig.step()
    rig.step()
    assert rig.scheduler.num_running == 512


def test_a_static_batch_starts_together_though_its_prompts_share_a_prefix() -> None:
    rig = Rig(num_blocks=400, block_size=4, rows=4, tokens=128, gate=BatchGate(4))
    for i in range(8):
        rig.add([*range(20), i], 10)
    rig.step()
    assert rig.scheduler.num_running == 4


def test_the_first_of_a_woken_group_may_be_aborted_before_its_turn() -> None:
    rig = _rig(rows=2)
    requests = [rig.add([*PREFIX, i], 4) for i in range(30)]
    blocked = rig.scheduler.state.waiting.blocked
    while not blocked.has_ready:
        rig.step()
    rig.step()  # eight of them return to the queue
    still_blocked = [req for req in requests if req.id in blocked._group_of]
    rig.abort(still_blocked[0].id)
    rig.drain()
    rig.verify()
    assert all(req.finish is Finish.LENGTH for req in still_blocked[1:])


def test_a_queued_request_gets_a_new_key_when_a_swapped_out_one_publishes_what_it_needs() -> None:
    rig = Rig(num_blocks=32, block_size=4, rows=1, tokens=32, host_blocks=16, policy=ShortestJobFirst(share_every=0))
    first = rig.add([1, 2, 3, 4], 20)
    for _ in range(14):
        rig.step()
    rig.add([9] * 10, 4)
    follow_up = rig.add([*first.tokens[:13], 8], 4)  # dearer than the other until its first blocks are cached
    queue = rig.scheduler.state.waiting.queue
    rig.step()
    assert queue.peek(rig.now) is not follow_up
    preempt(rig.scheduler.state, first)
    assert first.host_table, "it must have been swapped out"
    rig.scheduler.state.waiting.blocked.refill()
    assert queue.peek(rig.now) is follow_up
    rig.drain()
    rig.verify()


@pytest.mark.parametrize("options", [{"share_every": 10}, {"share_every": 0, "boost_after": 20.0}])
def test_rules_for_the_oldest_see_requests_that_woke_with_many_cheaper_ones(options: dict[str, float]) -> None:
    rig = Rig(num_blocks=900, block_size=4, rows=4, tokens=8, policy=ShortestJobFirst(**options))
    prefix = PREFIX[:32]
    rig.add([*prefix, 1], 4, expected=4.0)
    rig.step()
    old = rig.add([*prefix, 2], 40, expected=40.0)
    for i in range(400):
        rig.add([*prefix, 3 + i % 40, i // 40], 4, expected=4.0)
    assert len(rig.scheduler.state.waiting.blocked) == 401
    while old.row < 0:
        rig.step()
    assert len(rig.log.of(Admitted)) <= 40
