"""Paused rows: they lose nothing, keep their memory, and end as many steps later as they paused."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest

from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.core.rows import Calendar
from headway.values.states import Finish
from headway.values.work import Work
from rig import Rig
from scenario import run_scenario


class RandomPauses(Policy):
    """Pauses each running request by chance, whether or not it decodes."""

    def __init__(self, seed: int, chance: float = 0.5) -> None:
        super().__init__()
        self.num_paused = 0
        self._rng = random.Random(seed)
        self._chance = chance
        self._seen: dict[int, Request] = {}

    def on_admit(self, req: Request) -> None:
        self._seen[req.id] = req

    def itl_target(self) -> float:
        return 1.0

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        chosen = [req for req in self._seen.values() if self._rng.random() < self._chance]  # the ended too
        self.num_paused += sum(req.row >= 0 and req.num_output > 0 for req in chosen)
        return chosen


class NamedPauses(Policy):
    """Pauses the requests that a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: list[Request] = []
        self.work: list[Work] = []

    def itl_target(self) -> float:
        return 1.0

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        self.work.append(work)
        return self.paused


@pytest.mark.parametrize("chance", [0.3, 0.9])
def test_in_any_scenario_a_paused_request_gets_the_same_answer(chance: float) -> None:
    paused = 0
    for seed in range(150):
        policy = RandomPauses(seed, chance)
        run_scenario(seed, policy)
        paused += policy.num_paused
    assert paused > 1000


def test_a_paused_request_is_in_no_plan_and_ends_so_many_steps_later() -> None:
    policy = NamedPauses()
    rig = Rig(policy=policy, rows=2, block_size=4, num_blocks=16)
    one, two = rig.add([1, 2, 3], 9), rig.add([4, 5, 6], 9)
    for _ in range(3):
        rig.step()
    policy.paused = [two]
    for _ in range(4):
        plan = rig.step()
        assert plan is not None
        assert list(plan.decode) == [one.row]
    held = list(two.table)
    policy.paused = []
    while rig.scheduler.has_work:
        rig.step()
    assert rig.outcomes == {one.id: Finish.LENGTH, two.id: Finish.LENGTH}
    assert len(rig.streams[two.id]) == 9
    rig.verify()
    assert len(rig.plans) == 9 + 4
    assert held, "it kept its blocks while it was paused"


def test_the_policy_gets_all_rows_and_prompts_under_way() -> None:
    policy = NamedPauses()
    rig = Rig(policy=policy, rows=3, tokens=4, num_blocks=32)
    one, two = rig.add([1, 2, 3], 9), rig.add([4], 9)
    for _ in range(3):
        rig.step()
    policy.paused = [two]
    rig.step()
    before = policy.work[-1]
    rig.add(list(range(10)), 2)
    rig.step()
    rig.step()
    after = policy.work[-1]
    assert (before.decode, after.decode) == (2, 2), "a paused row is counted"
    assert after.context == before.context + 2, "one token more in each step for the row that decodes"
    assert (after.tokens, after.chunks) == (4, True), "no more prompt tokens than a step can carry"
    assert before.tokens == 0
    assert one.row >= 0


def test_at_least_one_row_always_runs() -> None:
    policy = NamedPauses()
    rig = Rig(policy=policy, rows=2)
    policy.paused = [rig.add([1], 5), rig.add([2], 5)]
    rig.drain(most=30)
    rig.verify()


def test_a_request_preempted_or_aborted_while_paused_leaves_nothing_behind() -> None:
    policy = NamedPauses()
    rig = Rig(policy=policy, rows=3, num_blocks=32)
    requests = [rig.add([id], 8) for id in range(3)]
    rig.step()
    rig.step()
    policy.paused = requests[1:]
    rig.step()
    preempt(rig.scheduler.state, requests[1])
    rig.abort(requests[2].id)
    assert not rig.scheduler.state.rows.paused
    policy.paused = []
    rig.drain()
    rig.verify()
    assert rig.outcomes[1] is Finish.LENGTH
    assert rig.outcomes[2] is Finish.ABORT


def test_a_row_has_one_date_at_most() -> None:
    calendar = Calendar()
    calendar.add(5, 1)
    calendar.add(5, 2)
    calendar.add(7, 1)
    assert calendar.take(5) == [2]
    assert calendar.strike(1) == 7
    assert calendar.strike(1) == -1
    assert calendar.take(7) == []
    assert not calendar._due, "nothing is kept of dates to come that were struck"


def test_by_default_no_request_pauses_and_there_is_no_itl_target() -> None:
    policy = Policy()
    assert policy.to_pause(0.0, Work()) == ()
    assert policy.itl_target() == math.inf
