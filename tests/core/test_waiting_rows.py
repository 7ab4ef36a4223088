"""Rows that find no memory because leases have it: they wait in their rows, and nothing is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.values.limits import Admission
from headway.values.states import State, WaitReason
from headway.values.work import Work
from rig import Rig


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lone_row_beside_a_held_request_waits_for_the_end_of_its_lease(depth: int) -> None:
    rig = Rig(num_blocks=24, block_size=1, rows=2, tokens=32, depth=depth)
    held = rig.add(list(range(12)), 1, lease_s=60.0)
    while held.state is not State.HELD:
        rig.step()
    long = rig.add([50, 51], 20)
    for _ in range(40):
        rig.step()
    assert (held.state, long.state) == (State.HELD, State.RUNNING)
    assert long.num_output >= 8, "it goes on while there is memory"
    rig.drain()
    rig.verify()
    assert long.num_preempted == 0
    assert long.waited[WaitReason.PAUSED].seconds > 10.0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_beside_kv_that_never_comes_are_preempted_a_bounded_number_of_times(depth: int) -> None:
    rig = Rig(num_blocks=24, block_size=1, rows=4, tokens=32, depth=depth)
    rig.add(list(range(14)), 4, state=State.LOADING)  # it never arrives: its lease ends after 30 s
    ones = [rig.add([20 + i, 40 + i], 16) for i in range(3)]
    rig.drain()
    rig.verify()
    assert max(req.num_preempted for req in ones) <= 3 + 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_waits_is_no_reason_to_plan_again_and_again(depth: int) -> None:
    """Others wait in the queue, nothing is in flight, and only the end of the lease helps."""
    rig = Rig(num_blocks=16, block_size=1, rows=2, tokens=32, depth=depth, admission=Admission.OPTIMISTIC)
    held = rig.add(list(range(8)), 1, lease_s=50.0)
    while held.state is not State.HELD:
        rig.step()
    long, other = rig.add([50, 51], 12), rig.add(list(range(20, 30)), 4)
    for _ in range(20):
        rig.step()
    assert rig.step() is None
    assert (long.state, other.state) == (State.RUNNING, State.WAITING)
    rig.release(held.id)
    rig.drain()
    rig.verify()
    assert (long.num_preempted, other.num_preempted) == (0, 0)


class PausesOne(Policy):
    """One request stands back for the others in every step; a plan that never comes to an end fails."""

    def __init__(self) -> None:
        self.one: Request | None = None
        self.num_asked: Counter[float] = Counter()  # by step

    def itl_target(self) -> float:
        return 1.0

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        self.num_asked[now] += 1
        assert self.num_asked[now] <= 10, "the phases run again and again in one step"
        return [self.one] if self.one is not None and self.one.row >= 0 else []


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_ends_where_one_row_is_short_of_memory_and_the_policy_pauses_the_other(depth: int) -> None:
    policy = PausesOne()
    rig = Rig(num_blocks=8, block_size=4, tokens=32, depth=depth, caching=False, preemptions=1, policy=policy)
    short, paused = rig.add([1, 2, 3, 4], 12), rig.add([5, 6, 7, 8], 8)
    for _ in range(2):
        rig.step()
        for req in (short, paused):
            preempt(rig.scheduler.state, req)  # once more than allowed: neither yields again
    rig.step()
    policy.one = paused
    rig.add(list(range(4 * rig.ledger.num_free - 2)), 2, state=State.LOADING)  # it never arrives
    while rig.step() is not None or rig.in_flight:
        pass
    assert (short.state, paused.state) == (State.RUNNING, State.RUNNING)
    assert rig.scheduler.state.leases, "only the end of the lease helps"
    rig.drain()
    rig.verify()
    assert (short.num_preempted, paused.num_preempted) == (2, 2)


def test_received_kv_is_freed_for_the_head_of_the_queue_while_a_lease_is_open() -> None:
    rig = Rig(num_blocks=10, block_size=4, tokens=64, caching=False)
    head = rig.add(list(range(24)), 2)
    received = rig.add(list(range(20)), 2, state=State.LOADING)
    loading = rig.add([1, 2, 3, 4], 2, state=State.LOADING)  # it never arrives
    rig.load(received.id, 20)
    assert rig.ledger.num_free < 6, "too few for the head"
    rig.step()
    assert (head.state, received.state, loading.state) == (State.RUNNING, State.WAITING, State.LOADING)
    rig.drain()
    rig.verify()
