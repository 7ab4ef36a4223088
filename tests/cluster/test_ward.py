"""Which request ends engines that joined, by a model of engines that hold requests and end by one of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from headway.cluster.ward import QUIET_S, Ward
from headway.engine.client import Submit
from headway.engine.journal import OpenRequest
from headway.values.params import SamplingParams


class Fleet:
    """Engines that take whatever they may have; `now` is the ward's time."""

    def __init__(self, num_engines: int) -> None:
        self.now = 0.0
        self.num_changes = 0
        self.ward = Ward(self._change, lambda: self.now)
        self.at: list[set[int]] = [set() for _ in range(num_engines)]
        self.entries: dict[int, OpenRequest] = {}

    def _change(self) -> None:
        self.num_changes += 1

    def add(self, ids: Iterable[int], engine: int) -> None:
        for id in ids:
            self.entries[id] = OpenRequest(Submit(id, [1], SamplingParams(max_tokens=9)), 0.0)
            self.at[engine].add(id)

    def crash(self, engine: int, after_s: float = 1.0) -> int | None:
        """What it held waits then."""
        self.now += after_s
        held, self.at[engine] = self.at[engine], set()
        for id in held:
            self.entries[id].num_barren += 1
        return self.ward.lost({id: self.entries[id] for id in sorted(held)})

    def waiting(self) -> list[int]:
        return sorted(self.entries.keys() - set().union(*self.at))

    def spread(self) -> None:
        """A moment later engines take what waits, where they may."""
        self.now += QUIET_S
        self.ward.look()
        for id in self.waiting():
            roomy = [each for each in self.at if self.ward.has_room(id, each)]
            if roomy:
                min(roomy, key=len).add(id)


def test_what_one_crash_held_goes_on_at_once_and_together() -> None:
    fleet = Fleet(2)
    fleet.add([1, 2, 3, 4], 0)
    assert fleet.crash(0) is None
    assert all(id in fleet.ward for id in (1, 2, 3, 4))
    assert all(fleet.ward.has_room(id, [1, 2, 3, 4]) for id in (1, 2, 3, 4))


def test_suspects_of_a_second_crash_wait_a_moment_and_no_engine_has_more_than_half_of_them() -> None:
    fleet = Fleet(2)
    fleet.add([1, 2, 3, 4], 0)
    fleet.crash(0)
    fleet.add([1, 2, 3, 4, 5], 1)
    fleet.crash(1)
    assert not any(fleet.ward.has_room(id, []) for id in (1, 2, 3, 4, 5))
    assert fleet.ward.has_room(6, []), "it was in no crash"
    fleet.now += QUIET_S
    fleet.ward.look()
    assert fleet.num_changes == 1
    assert [fleet.ward.has_room(1, beside) for beside in ([], [2], [2, 3], [5, 6], [2, 5, 6])] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert fleet.ward.has_room(5, [1, 2, 3, 4]), "it was in one crash"


def test_what_waits_may_run_when_one_is_cleared() -> None:
    fleet = Fleet(1)
    fleet.add([1, 2], 0)
    fleet.crash(0)
    fleet.add([1, 2], 0)
    fleet.crash(0)
    fleet.spread()
    assert fleet.at == [{1}]
    fleet.ward.cleared(1)
    assert fleet.num_changes == 2
    assert fleet.ward.has_room(2, [1])


@pytest.mark.parametrize("num_engines", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_one_request_of_many_is_found_after_two_crashes_and_one_for_each_halving(num_engines: int, seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.randint(2, 64)
    bad, fleet = rng.randint(1, batch), Fleet(num_engines)
    fleet.add(range(1, batch + 1), 0)
    fleet.add(range(100, 110), -1)
    size = max(len(each) for each in fleet.at)
    num_crashes, blamed = 0, None
    while blamed is None and num_crashes < 20:
        at = next((at for at, each in enumerate(fleet.at) if bad in each), None)
        if at is None:  # it waits for others, one of which gets its tokens
            done = rng.choice([id for each in fleet.at for id in each if id in fleet.ward])
            fleet.ward.cleared(done)
            fleet.entries[done].num_barren = 0
        else:
            blamed = fleet.crash(at)
            num_crashes += 1
        fleet.spread()
    assert blamed == bad
    assert num_crashes <= max(3, 2 + math.ceil(math.log2(size)))


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_end_together_leave_no_request_to_blame(seed: int) -> None:
    """What one held goes to the next, which has ended as well and is not known to."""
    rng, fleet = random.Random(seed), Fleet(8)
    for at in range(8):
        fleet.add(range(10 * at, 10 * at + rng.randint(0, 3)), at)
    for at in range(8):
        assert fleet.crash(at, after_s=0.001) is None
        if at < 7:
            for id in [id for id in fleet.waiting() if fleet.ward.admits(id)]:
                fleet.at[rng.randint(at + 1, 7)].add(id)
    fleet.spread()
    assert fleet.waiting() == [], "there are engines enough for all at once"


def test_a_request_alone_in_two_crashes_that_are_apart_is_to_blame() -> None:
    fleet = Fleet(2)
    fleet.add([7], 0)
    assert fleet.crash(0) is None
    fleet.at[1].add(7)
    assert fleet.crash(1) == 7


def test_requests_beside_the_one_that_ends_engines_are_not_blamed() -> None:
    fleet = Fleet(3)
    fleet.add([1, 2, 3, 4], 0)
    fleet.crash(0)
    fleet.at[1] = {1, 2, 3, 4}
    fleet.crash(1)
    fleet.spread()
    fleet.at = [{1, 2}, {3, 4}, set()]
    assert fleet.crash(0) is None
    fleet.at = [set(), {1, 3}, {2}]  # 3 was in two crashes as 1 was
    assert fleet.crash(1) == 1


def test_a_request_that_got_a_token_between_two_crashes_is_not_yet_to_blame() -> None:
    fleet = Fleet(1)
    fleet.add([1, 2, 3], 0)
    fleet.crash(0)
    fleet.at[0] = {1, 3}
    fleet.ward.cleared(3)
    fleet.crash(0)  # 1 is the only candidate
    fleet.entries[1].num_barren = 1
    fleet.at[0] = {1, 2}
    assert fleet.crash(0) is None
    fleet.at[0] = {1, 2}
    assert fleet.crash(0) == 1
