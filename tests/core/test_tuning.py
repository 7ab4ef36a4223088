"""Rules that change under waiting and running requests."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

from headway.core.queue import RankQueue
from headway.core.request import Account, Request
from headway.policies._shares import ShareQueue
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan
from rig import Rig

NOTHING = StepPlan(-1, array("i"))


def _requests(costs: list[int]) -> list[Request]:
    return [Request(id, [1] * cost, SamplingParams(), arrival=float(id)) for id, cost in enumerate(costs)]


def _drain(queue: RankQueue, now: float = 100.0) -> list[int]:
    order = []
    while (req := queue.peek(now)) is not None:
        queue.admit(req)
        order.append(req.id)
    return order


def test_tuned_queue_reorders_all_requests_by_the_current_key() -> None:
    sign = [1]
    queue = RankQueue(lambda req: (sign[0] * req.num_prompt,))
    for req in _requests([5, 9, 7, 1]):
        queue.push(req)
    queue.remove(2)
    sign[0] = -1
    queue.tune(0, math.inf)
    queue.push(Request(9, [1] * 6, SamplingParams(), arrival=9.0))
    assert _drain(queue) == [1, 9, 0, 3]


def test_a_share_for_the_oldest_can_begin_and_end_while_they_wait() -> None:
    queue = RankQueue(lambda req: (req.num_prompt,))
    for req in _requests([9, 8, 7, 6, 5, 4, 3, 2]):
        queue.push(req)
    queue.tune(2, math.inf)
    order = []
    for _ in range(4):
        req = queue.peek(0.0)
        assert req is not None
        queue.admit(req)
        order.append(req.id)
    assert order == [7, 0, 6, 1]
    queue.tune(0, math.inf)
    assert _drain(queue) == [5, 4, 3, 2]


def test_a_boost_can_begin_while_they_wait() -> None:
    queue = RankQueue(lambda req: (req.num_prompt,))
    for req in _requests([9, 8, 1]):
        queue.push(req)
    queue.tune(0, 50.0)
    assert _drain(queue, now=51.5) == [0, 1, 2]


def test_a_share_queue_lists_its_inner_queues() -> None:
    queue = ShareQueue(lambda account: account.tenant, lambda: RankQueue(lambda req: (req.arrival,)))
    assert queue.queues() == []
    for tenant in ("ann", "bob"):
        req = Request(len(tenant) + ord(tenant[0]), [1], SamplingParams(), tenant=tenant)
        assert req.account == Account("", tenant)
        queue.push(req)
    assert [len(inner) for inner in queue.queues()] == [1, 1]


def test_fewer_slots_than_are_taken_let_all_finish_and_admit_none() -> None:
    rig = Rig(rows=4, tokens=16, num_blocks=64)
    for i in range(10):
        rig.add([i, i + 1, i + 2], max_tokens=6)
    rig.step()
    rig.scheduler.reconfigure(replace(rig.scheduler.state.limits, rows=2, tokens=2))
    assert rig.scheduler.state.num_slots == 0
    running = [rig.scheduler.num_running]
    while rig.scheduler.has_work:
        joined = {join.id for join in (rig.step() or NOTHING).joins}
        running.append(rig.scheduler.num_running)
        assert not joined or running[-1] <= 2, "more run than may, until they are done: none joins them"
    assert running[0] == 4
    rig.drain()
    rig.verify()
    assert len(rig.outcomes) == 10
