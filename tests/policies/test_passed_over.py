"""A request that is skipped because it does not fit keeps its place in every queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.core.policy import Policy
from headway.core.queue import OrderedQueue
from headway.core.request import Account, Request
from headway.policies._shared import Laned, Shared
from headway.policies._shares import ShareQueue
from headway.policies.fair import Fair
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.lpm import LongestPrefixMatch
from headway.policies.sjf import ShortestJobFirst
from headway.values.params import SamplingParams
from rig import Rig


def _queue(policy: Policy) -> tuple[OrderedQueue, list[Request]]:
    queue = policy.queue()
    requests = [
        Request(id, [1] * (1 + 7 * id % 40), SamplingParams(max_tokens=1 + id % 5), arrival=id, tenant="abc"[id % 3])
        for id in range(60)
    ]
    for req in requests:
        queue.push(req)
    return queue, requests


def _in_a_lane() -> Policy:
    return Laned(ShortestJobFirst(), lanes={"": 1.0})


@pytest.mark.parametrize(
    "policy",
    [
        FirstComeFirstServed,
        ShortestJobFirst,
        Fair,
        LongestPrefixMatch,
        _in_a_lane,
    ],
)
def test_the_first_few_begin_with_the_next_and_no_request_moves(policy: Callable[[], Policy]) -> None:
    queue, requests = _queue(policy())
    head = queue.peek(100.0)
    few = queue.first(8, 100.0)
    assert few[0] is head
    assert len({req.id for req in few}) == len(few) > 1
    assert queue.peek(100.0) is head
    assert len(queue) == len(requests)
    assert {req.id for req in few} <= {req.id for req in queue.requests()}


def test_the_first_few_of_shares_are_those_of_the_poorest_then_of_the_next() -> None:
    queue, _ = _queue(Fair())
    for tenant, amount in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        queue.charge(Account("", tenant), amount)
    assert [req.tenant for req in queue.first(45, 100.0)] == ["b"] * 20 + ["c"] * 20 + ["a"] * 5


def test_a_tenant_that_is_passed_over_keeps_its_credit() -> None:
    policy = Shared(ShortestJobFirst(share_every=0))
    rig = Rig(num_blocks=8, block_size=2, rows=4, tokens=32, policy=policy)
    rig.add([1] * 8, 4, tenant="cem")
    rig.step()
    large = rig.add([2] * 12, 2, tenant="ann")
    small = [rig.add([3 + i] * 2, 2, tenant="bob") for i in range(3)]
    policy.on_tokens(small[0].account, 0, 500)
    shares = rig.scheduler.state.waiting.queue
    assert isinstance(shares, ShareQueue)
    credit = shares.paid("ann")
    rig.step()
    assert large.row < 0
    assert small[0].row >= 0, "another request must have been admitted before it"
    assert shares.paid("ann") == credit < shares.paid("bob")
    rig.drain()
    rig.verify()
