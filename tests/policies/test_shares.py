"""fair and lanes: shares by weight, no credit for idleness, nothing kept free, and who cannot stand within them."""

from __future__ import annotations

import pytest

from headway import plugins
from headway.bench.virtual import Job
from headway.core.policy import Policy
from headway.core.queue import RankQueue
from headway.core.request import Account, Request
from headway.errors import ConfigError
from headway.policies._shared import Shared
from headway.policies._shares import ShareQueue
from headway.policies.fair import Fair
from headway.policies.sjf import ShortestJobFirst
from headway.values.params import SamplingParams
from rig import Rig
from served import order, serve


def _request(id: int, tenant: str) -> Request:
    return Request(id, [1], SamplingParams(), arrival=float(id), tenant=tenant)


def _shares(**weights: float) -> ShareQueue:
    return ShareQueue(lambda account: account.tenant, lambda: RankQueue(lambda req: (req.arrival,)), weights)


def _take(queue: ShareQueue, count: int, price: float = 10.0) -> list[str]:
    taken = []
    for _ in range(count):
        req = queue.peek(0.0)
        assert req is not None
        queue.admit(req)
        queue.charge(req.account, price)
        taken.append(req.tenant)
    return taken


def test_tenants_take_turns_however_many_each_sends() -> None:
    jobs = [Job(0.0, 16, 16, tenant="ann") for _ in range(6)] + [Job(0.0, 16, 16, tenant="bob") for _ in range(3)]
    got = [jobs[i].tenant for i in order(jobs, Fair)]
    assert got[:6].count("bob") == 3
    assert got[6:] == ["ann"] * 3


def test_a_tenant_of_twice_the_weight_gets_twice_the_service() -> None:
    queue = _shares(ann=1.0, bob=2.0)
    for id in range(60):
        queue.push(_request(id, "ann" if id % 2 else "bob"))
    taken = _take(queue, 30)
    assert taken.count("bob") == 20


def test_idleness_earns_no_credit() -> None:
    queue = _shares()
    for id in range(100):
        queue.push(_request(id, "bob"))
    _take(queue, 50)
    for id in range(100, 140):
        queue.push(_request(id, "ann"))
    assert _take(queue, 20).count("ann") == 10


def test_idleness_earns_no_credit_when_nobody_waits_either() -> None:
    queue = _shares()
    for id in range(50):
        queue.push(_request(id, "bob"))
    _take(queue, 50)
    for id in range(50, 100):
        queue.push(_request(id, "bob" if id % 2 else "ann"))
    assert 9 <= _take(queue, 20).count("ann") <= 11


def test_debts_stay_while_a_tenant_is_away() -> None:
    queue = _shares()
    queue.push(_request(0, "bob"))
    queue.push(_request(1, "ann"))
    _take(queue, 2)
    queue.charge(Account("", "bob"), 100.0)
    for id in range(2, 12):
        queue.push(_request(id, "bob" if id % 2 else "ann"))
    assert _take(queue, 5) == ["ann"] * 5


def test_weights_may_change_while_requests_wait() -> None:
    queue = _shares()
    for id in range(200):
        queue.push(_request(id, "ann" if id % 2 else "bob"))
    assert _take(queue, 20).count("bob") == 10
    queue.reweigh({"bob": 4.0})
    assert _take(queue, 50).count("bob") == pytest.approx(40, abs=1)


def test_what_is_found_in_the_cache_is_cheap() -> None:
    policy = Fair()
    queue = policy.queue()
    for id, tenant in ((0, "ann"), (1, "bob"), (2, "ann"), (3, "bob")):
        queue.push(_request(id, tenant))
    for id, cached in ((0, 90), (1, 0)):
        req = Request(id, [1] * 100, SamplingParams(), tenant="ann" if id == 0 else "bob")
        req.num_cached = cached
        policy.on_admit(req)
    assert isinstance(queue, ShareQueue)
    assert (queue.paid("ann"), queue.paid("bob")) == (pytest.approx(19.0), pytest.approx(100.0))


def test_lanes_share_by_weight_and_lend_what_nobody_wants() -> None:
    def policy() -> Policy:
        return Shared(ShortestJobFirst(), fair=False, lanes={"interactive": 80.0, "batch": 20.0})

    jobs = [Job(0.0, 16, 16, lane="batch" if i % 2 else "interactive") for i in range(100)]
    first = [jobs[i].lane for i in order(jobs, policy)][:50]
    assert first.count("batch") == pytest.approx(10, abs=1)
    alone = [Job(0.0, 16, 16, lane="batch") for _ in range(20)]
    assert serve(alone, policy, seats=4).makespan == serve(alone, Policy, seats=4).makespan


def test_lanes_hold_tenants_who_hold_the_order_of_the_policy() -> None:
    def policy() -> Policy:
        return Shared(ShortestJobFirst(share_every=0), lanes={"one": 50.0, "two": 50.0})

    long, short = 100, 10
    jobs = [Job(0.0, 16, n, lane="one", tenant=t, expected=float(n)) for t in ("ann", "bob") for n in (long, short)]
    assert order(jobs, policy) == [1, 3, 0, 2]


@pytest.mark.parametrize("name", ["srpt", "mlfq", "lpm", "priority"])
def test_policies_of_the_whole_queue_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' orders everybody who waits together.*take fcfs, sjf"):
        Shared(plugins.load("policies", name)(), name=name)


@pytest.mark.parametrize("name", ["fcfs", "sjf", "ltr", "edf", "slo", "hrrn"])
def test_other_policies_stand_within_shares(name: str) -> None:
    def policy() -> Policy:
        return Shared(plugins.load("policies", name)(), name=name, lanes={"a": 1.0, "b": 1.0})

    jobs = [Job(0.1 * i, 16, 8, lane="a" if i % 2 else "b", tenant=str(i % 3)) for i in range(20)]
    assert all(trip.is_answered for trip in serve(jobs, policy, seats=2).trips)


class Told(Policy):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def on_admit(self, req: Request) -> None:
        self.said.add("admit")

    def on_publish(self, key: bytes) -> None:
        self.said.add("publish")

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        self.said.add("tokens")

    def on_finish(self, req: Request) -> None:
        self.said.add("finish")


def test_a_policy_within_shares_is_told_all_that_happens() -> None:
    base = Told()
    rig = Rig(policy=Shared(base))
    rig.add([1] * 9, 4)
    rig.drain()
    assert base.said == {"admit", "publish", "tokens", "finish"}
