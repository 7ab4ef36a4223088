"""Rows that find no memory because leases have it: they wait in their rows, and nothing is computed again."""

from __future__ import annotations

import pytest

from headway.values.limits import Admission
from headway.values.states import State, WaitReason
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
