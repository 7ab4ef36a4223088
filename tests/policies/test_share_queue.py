"""Shares: the group that has paid least is next, weights count, idleness earns nothing, idle groups are forgotten."""

from __future__ import annotations

import pytest

from headway.core.queue import RankQueue
from headway.core.request import Account, Request
from headway.policies._shares import MOST_DEBTS, ShareQueue
from headway.values.params import SamplingParams


def _request(id: int, tenant: str, lane: str = "") -> Request:
    return Request(id, [1], SamplingParams(), arrival=float(id), tenant=tenant, lane=lane)


def _fifo() -> RankQueue:
    return RankQueue(lambda req: (req.arrival,))


def _tenants(**weights: float) -> ShareQueue:
    return ShareQueue(lambda account: account.tenant, _fifo, weights)


def _serve(queue: ShareQueue, count: int, cost: float = 1.0) -> list[str]:
    served = []
    for _ in range(count):
        req = queue.peek(0.0)
        assert req is not None
        queue.admit(req)
        queue.charge(req.account, cost)
        served.append(req.tenant or req.lane)
    return served


def _fill(queue: ShareQueue, tenant: str, count: int, first: int = 0) -> None:
    for id in range(first, first + count):
        queue.push(_request(id, tenant))


def test_tenants_take_turns_whatever_their_numbers() -> None:
    queue = _tenants()
    _fill(queue, "many", 90)
    _fill(queue, "few", 10, first=100)
    served = _serve(queue, 20)
    assert served.count("few") == served.count("many") == 10
    assert len(queue) == 80
    assert {req.id for req in queue.requests()} == set(range(10, 90))


def test_weights_are_shares() -> None:
    queue = _tenants(big=3.0)
    _fill(queue, "big", 90)
    _fill(queue, "small", 90, first=100)
    assert _serve(queue, 40).count("big") == 30
    queue.reweigh({"small": 3.0})
    assert _serve(queue, 40).count("small") == pytest.approx(30, abs=1)


def test_idleness_earns_no_credit() -> None:
    queue = _tenants()
    _fill(queue, "busy", 200)
    _serve(queue, 100)
    _fill(queue, "late", 50, first=300)
    assert _serve(queue, 20).count("late") == 10
    assert queue.paid("late") >= 100
    assert queue.paid("unknown") == 0.0


def test_a_tenant_that_comes_to_an_empty_queue_starts_at_the_last_virtual_time() -> None:
    queue = _tenants()
    _fill(queue, "first", 10)
    _serve(queue, 10)
    _fill(queue, "second", 5, first=20)
    _fill(queue, "first", 5, first=30)
    assert _serve(queue, 6).count("second") == 3


def test_removed_requests_are_gone_and_the_queue_ends_empty() -> None:
    queue = _tenants()
    _fill(queue, "one", 2)
    assert queue.remove(0)
    assert not queue.remove(0)
    assert _serve(queue, 1) == ["one"]
    assert queue.peek(0.0) is None


def test_the_first_few_are_found_behind_many_groups_that_left() -> None:
    queue = _tenants()
    for id in range(40):
        queue.push(_request(id, f"t{id}"))
    for id in range(1, 36):
        queue.remove(id)
    assert [req.id for req in queue.first(4, 0.0)] == [0, 36, 37, 38]


def test_groups_that_owe_nothing_are_forgotten() -> None:
    queue = _tenants()
    for id in range(5000):
        queue.push(_request(id, f"tenant {id}"))
        _serve(queue, 1)
    assert len(queue._groups) <= 2 * MOST_DEBTS + 1
    queue.charge(Account("", "tenant 0"), 5.0)  # forgotten: nothing to pay for
    assert queue.paid("tenant 0") == 0.0
    assert queue.paid("tenant 4999") == 1.0


def test_charges_of_waiting_requests_do_not_pile_up() -> None:
    queue = _tenants()
    _fill(queue, "one", 2)
    _fill(queue, "two", 2, first=5)
    for _ in range(1000):
        queue.charge(Account("", "one"), 1.0)
    assert len(queue._heap) < 100
    assert _serve(queue, 2) == ["two", "two"]


def test_lanes_of_tenants_share_twice() -> None:
    queue = ShareQueue(lambda account: account.lane, _tenants, {"fast": 80.0, "slow": 20.0})
    for id in range(200):
        queue.push(_request(id, f"t{id % 2}", "fast" if id < 100 else "slow"))
    served = []
    for _ in range(50):
        req = queue.peek(0.0)
        assert req is not None
        queue.admit(req)
        queue.charge(req.account, 1.0)
        served.append((req.lane, req.tenant))
    fast = [tenant for lane, tenant in served if lane == "fast"]
    assert len(fast) == 40
    assert fast.count("t0") == 20


def test_a_tenant_of_twice_the_weight_gets_twice_the_service() -> None:
    queue = _tenants(ann=1.0, bob=2.0)
    for id in range(60):
        queue.push(_request(id, "ann" if id % 2 else "bob"))
    taken = _serve(queue, 30)
    assert taken.count("bob") == 20


def test_idleness_earns_no_credit_while_others_wait() -> None:
    queue = _tenants()
    for id in range(100):
        queue.push(_request(id, "bob"))
    _serve(queue, 50)
    for id in range(100, 140):
        queue.push(_request(id, "ann"))
    assert _serve(queue, 20).count("ann") == 10


def test_idleness_earns_no_credit_when_no_request_waits_either() -> None:
    queue = _tenants()
    for id in range(50):
        queue.push(_request(id, "bob"))
    _serve(queue, 50)
    for id in range(50, 100):
        queue.push(_request(id, "bob" if id % 2 else "ann"))
    assert 9 <= _serve(queue, 20).count("ann") <= 11


def test_debts_stay_while_a_tenant_is_away() -> None:
    queue = _tenants()
    queue.push(_request(0, "bob"))
    queue.push(_request(1, "ann"))
    _serve(queue, 2)
    queue.charge(Account("", "bob"), 100.0)
    for id in range(2, 12):
        queue.push(_request(id, "bob" if id % 2 else "ann"))
    assert _serve(queue, 5) == ["ann"] * 5


def test_weights_may_change_while_requests_wait() -> None:
    queue = _tenants()
    for id in range(200):
        queue.push(_request(id, "ann" if id % 2 else "bob"))
    assert _serve(queue, 20).count("bob") == 10
    queue.reweigh({"bob": 4.0})
    assert _serve(queue, 50).count("bob") == pytest.approx(40, abs=1)


def test_a_group_whose_only_request_is_blocked_at_the_head_is_not_idle() -> None:
    queue = _tenants()
    for id, tenant in ((1, "ann"), (2, "bob"), (3, "ann")):
        queue.push(_request(id, tenant))
    for cost in (100.0, 10.0):
        req = queue.peek(4.0)
        assert req is not None
        queue.admit(req)
        queue.charge(req.account, cost)
    late = _request(5, "bob")
    queue.push(late)
    before = queue.paid("bob")
    queue.peek(6.0)
    assert queue.remove(late.id)
    queue.charge(Account("", "ann"), 500.0)
    queue.push(late)
    assert queue.paid("bob") == before
