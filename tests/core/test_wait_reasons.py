"""Every wait has a reason: steps and seconds by reason add up to the time between arrival and admission."""

from __future__ import annotations

import random

import pytest
from core.test_pausing import NamedPauses, RandomPauses

from headway.control.gates import BatchGate
from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.core.waits import MOST_OVERTAKINGS, Overtakings
from headway.policies.priority import Priority
from headway.policies.sjf import ShortestJobFirst
from headway.values.events import Admitted, Finished, Preempted
from headway.values.states import State, Waited, WaitReason
from headway.values.work import Work
from rig import Rig


class Full:
    """A pacer that never lets a second row in."""

    def tokens(self, work: Work, start: int, itl_target: float) -> int:
        return 1 << 30

    def has_slot(self, work: Work) -> bool:
        return False


def _reasons(req: Request) -> dict[WaitReason, int]:
    return {reason: waited.steps for reason, waited in req.waited.items()}


@pytest.mark.parametrize(
    ("reason", "shape"),
    [
        (WaitReason.SLOTS, {"rows": 1}),
        (WaitReason.TOKENS, {"tokens": 4, "partial": 1}),
        (WaitReason.BLOCKS, {"num_blocks": 4}),
        (WaitReason.PACING, {"pacer": Full()}),
        (WaitReason.BARRIER, {"gate": BatchGate(1)}),
    ],
)
def test_a_request_waits_for_what_the_head_waits_for(reason: WaitReason, shape: dict) -> None:
    rig = Rig(**{"num_blocks": 40, "block_size": 4, "rows": 4, "tokens": 64, **shape})
    rig.add([1] * 12, 3)
    second, third = rig.add([2] * 12, 3), rig.add([3] * 12, 3)
    rig.drain()
    rig.verify()
    assert set(second.waited) == {reason}
    assert set(third.waited) == {reason}
    assert third.waited[reason].steps > second.waited[reason].steps > 0
    assert second.waited[reason].seconds == pytest.approx(second.waited[reason].steps)  # a step of the rig takes 1 s


def test_a_request_that_ends_without_a_slot_says_what_it_waited_for() -> None:
    rig = Rig(rows=1)
    rig.add([1], 50)
    waiting = rig.add([2], 3)
    for _ in range(4):
        rig.step()
    rig.abort(waiting.id)
    (ended,) = (event for event in rig.log.of(Finished) if event.id == waiting.id)
    assert dict(ended.waited) == waiting.waited
    assert set(waiting.waited) == {WaitReason.SLOTS}


def test_a_blocked_request_waits_for_its_prefix_and_not_for_the_head() -> None:
    rig = Rig(num_blocks=400, block_size=4, rows=3, tokens=8, chunk=4)
    rig.add(list(range(16)), 1)
    rig.add([99] * 3, 20)
    blocked = rig.add(list(range(16)), 1)
    rig.drain()
    rig.verify()
    assert blocked.waited[WaitReason.PREFIX].steps >= 2


def test_followers_of_a_prompt_wait_for_its_prefix() -> None:
    rig = Rig(num_blocks=400, block_size=4, rows=4, tokens=8, chunk=4)
    leader = rig.add(list(range(16)), 1)
    follower = rig.add(list(range(16)), 1, seed=1, parent=leader.id)
    rig.drain()
    assert _reasons(follower) == {WaitReason.PREFIX: 3}


def test_a_paused_row_is_charged_its_pauses() -> None:
    policy = RandomPauses(1)
    rig = Rig(policy=policy, num_blocks=40)
    requests = [rig.add([i] * 4, 12) for i in range(4)]
    rig.drain()
    rig.verify()
    assert any(req.waited[WaitReason.PAUSED].steps > 0 for req in requests if WaitReason.PAUSED in req.waited)


def test_a_request_that_arrives_during_a_step_is_not_charged_the_part_before() -> None:
    rig = Rig(rows=1)
    rig.add([1] * 4, 4)
    late = Rig.add  # the rig stamps arrivals with ids: give this one a time of its own
    rig.add([2] * 4, 1)
    rig.step()  # at 1.0: the second waits for a slot
    third = late(rig, [3] * 4, 1)
    third_arrival = third.arrival = 1.75
    rig.scheduler.state.waiting.waits.leave(third)
    rig.scheduler.state.waiting.waits.enter(third)
    rig.drain()
    admitted = next(event for event in rig.log.of(Admitted) if event.id == third.id)
    assert sum(waited.seconds for waited in third.waited.values()) == pytest.approx(admitted.now - third_arrival)


def test_overtakings_count_later_arrivals_that_were_admitted_first() -> None:
    rig = Rig(rows=1, num_blocks=64, policy=ShortestJobFirst(share_every=0))
    rig.add([9] * 2, 3)
    rig.step()
    long = rig.add([1] * 20, 8, expected=8.0)
    for i in range(5):
        rig.add([2 + i] * 2, 1, expected=1.0)
    rig.drain()
    assert long.num_overtaken == 5
    assert [event.num_overtaken for event in rig.log.of(Admitted) if event.id == long.id] == [5]


def test_arrival_order_overtakes_no_request() -> None:
    rig = Rig(rows=2, num_blocks=64)
    requests = [rig.add([i] * 3, 2) for i in range(200)]
    rig.abort(requests[150].id)
    rig.drain()
    assert {req.num_overtaken for req in requests} == {0}


@pytest.mark.parametrize("seed", range(5))
def test_overtakings_agree_with_a_plain_count(seed: int) -> None:
    rng, counter = random.Random(seed), Overtakings()
    waiting: list[int] = []
    admitted: list[int] = []
    for _ in range(3000 if seed else 20_000):
        if rng.random() < 0.5 or not waiting:
            waiting.append(counter.arrive())
            continue
        number = waiting.pop(rng.randrange(max(0, len(waiting) - 200), len(waiting)) if rng.random() < 0.8 else 0)
        is_admitted = rng.random() < 0.9
        assert counter.leave(number, is_admitted) == sum(other > number for other in admitted[-4000:])
        if is_admitted:
            admitted.append(number)


@pytest.mark.parametrize("policy", [Policy, Priority])
def test_all_waiting_time_has_a_reason(policy: type[Policy]) -> None:
    rng = random.Random(3)
    rig = Rig(rows=3, num_blocks=12, block_size=4, tokens=12, policy=policy())
    requests = []
    for _ in range(30):
        requests.append(rig.add([rng.randrange(50) for _ in range(rng.randint(1, 9))], 5, priority=rng.randrange(3)))
        requests[-1].arrival = rig.now
        rig.step()
    rig.drain()
    rig.verify()
    first = {}
    for event in rig.log.of(Admitted):
        first.setdefault(event.id, event)
    for req in requests:
        waited = sum(waited.seconds for _, waited in first[req.id].waited)
        # Until the first step that finds it waiting there may be no reason: nothing had been waiting.
        assert waited == pytest.approx(first[req.id].now - req.arrival, abs=1.0)


def test_a_row_that_is_preempted_while_it_is_paused_is_charged_its_pause() -> None:
    policy = NamedPauses()
    rig = Rig(policy=policy, rows=2, num_blocks=32)
    _, paused = (rig.add([id], 8) for id in range(2))
    rig.step()
    rig.step()
    policy.paused = [paused]
    for _ in range(3):
        rig.step()
    preempt(rig.scheduler.state, paused)
    assert paused.waited[WaitReason.PAUSED] == (3, 2.0)  # seconds since the pause began, as of the last call
    policy.paused = []
    rig.drain()
    rig.verify()


def test_steps_count_plans_and_not_calls() -> None:
    rig = Rig(rows=1, depth=2)
    rig.add([1] * 4, 1, needs_feedback=True)
    waiting = rig.add([2] * 4, 1)
    plan = rig.scheduler.schedule(1.0)
    assert plan is not None
    rig.executor.submit(plan)
    rig.in_flight.append(plan)
    for now in (2.0, 3.0, 4.0):
        assert rig.scheduler.schedule(now) is None  # the row waits for its result
    rig.collect()
    rig.now = 5.0
    rig.step()
    assert waiting.waited == {WaitReason.SLOTS: (1, 5.0)}  # from 1.0 to 6.0


class Short(Policy):
    """Requests that are not urgent must start within five seconds."""

    def latest_start(self, req: Request) -> float:
        return req.arrival + 5.0 if req.priority else float("inf")


def test_a_request_that_is_shed_is_charged_its_last_step() -> None:
    rig = Rig(rows=1, policy=Short())
    rig.add([1] * 4, 12)
    rig.step()
    shed = rig.add([2] * 4, 1, priority=1)  # arrives at 1.0
    while shed.finish is None:
        rig.step()
    assert shed.waited[WaitReason.SLOTS].seconds == rig.now - shed.arrival


def test_overtakings_are_counted_as_far_as_the_docstring_says() -> None:
    counter = Overtakings()
    early = counter.arrive()
    for _ in range(MOST_OVERTAKINGS + 5):
        counter.leave(counter.arrive(), is_admitted=True)
    assert counter.leave(early, is_admitted=False) == MOST_OVERTAKINGS


def test_a_request_blocked_behind_a_blocked_one_waits_for_its_prefix() -> None:
    rig = Rig(num_blocks=200, block_size=4, rows=4, tokens=8, chunk=4, policy=Priority())
    prefix, more = list(range(40)), [41] * 8
    for last, priority in ((1, 1), (2, 1), (3, 0)):
        rig.add([*prefix, *(more if priority else ()), last], 2, priority=priority)
    rig.drain()
    rig.verify()
    for event in rig.log.of(Admitted):
        assert sum(waited.seconds for _, waited in event.waited) >= event.now - 1.0 - rig.accepted[event.id].arrival


def test_a_request_preempted_for_another_ones_chunk_waits_for_blocks() -> None:
    rig = Rig(rows=3, num_blocks=4, block_size=4, tokens=16)
    for i in (1, 2):
        rig.add([i] * 4, 12, needs_feedback=True)
    rig.drain()
    (event,) = rig.log.of(Preempted)
    (back,) = [admitted for admitted in rig.log.of(Admitted) if admitted.is_resumed]
    assert dict(back.waited)[WaitReason.BLOCKS].seconds == back.now - event.now


@pytest.mark.parametrize("num_tokens", [0, 8])
def test_time_in_which_kv_is_on_its_way_is_told_as_such(num_tokens: int) -> None:
    rig = Rig(rows=1, num_blocks=32, block_size=4)
    rig.add([1] * 4, 6)
    loading = rig.add(list(range(2, 14)), 2, state=State.LOADING)  # ids are the times at which they come
    gone = rig.add(list(range(20, 30)), 2, state=State.LOADING)
    for _ in range(3):
        rig.step()
    rig.load(loading.id, num_tokens)
    rig.abort(gone.id)
    rig.drain()
    rig.verify()
    assert loading.waited[WaitReason.LOADING].seconds == 2.0
    assert gone.waited == {WaitReason.LOADING: (0, 1.0)}
    (admitted,) = [event for event in rig.log.of(Admitted) if event.id == loading.id]
    assert sum(waited.seconds for _, waited in admitted.waited) == admitted.now - loading.arrival
    assert set(loading.waited) == {WaitReason.LOADING, WaitReason.SLOTS}


def test_what_was_waited_outside_the_queue_is_not_charged_again_in_the_step_under_way() -> None:
    rig = Rig(rows=1)
    rig.add([1] * 4, 6)
    rig.add([2] * 4, 1)
    rig.step()  # at 1.0; the second waits for the slot
    waited = {WaitReason.GRAMMAR: Waited(0, 0.5)}
    late = rig.add([3] * 4, 1, waited=waited)  # it came at 2.0, its grammar was there at 2.5
    rig.drain()
    (admitted,) = [event for event in rig.log.of(Admitted) if event.id == late.id]
    assert sum(waited.seconds for _, waited in admitted.waited) == admitted.now - late.arrival
    assert dict(admitted.waited)[WaitReason.GRAMMAR].seconds == 0.5
