"""hrrn and lpm: waiting outweighs cost in time, and what is cached goes first, within a tenant's deficit."""

from __future__ import annotations

import pytest

from headway.bench.virtual import Job
from headway.core.request import Request
from headway.policies._shares import MOST_DEBTS
from headway.policies.hrrn import HighestRatioNext, RatioQueue
from headway.policies.lpm import MOST_LOOKS, LongestPrefixMatch, PrefixQueue, _Tenant
from headway.values.params import SamplingParams
from rig import Rig
from served import order

PREFIX = list(range(1, 9))  # two blocks of four


def _request(id: int, arrival: float, cost: float) -> Request:
    return Request(id, [1], SamplingParams(), arrival=arrival, expected=cost)


def test_hrrn_takes_the_cheap_one_until_the_costly_one_has_waited_for_its_cost() -> None:
    queue = RatioQueue(lambda req: req.expected)
    costly, cheap = _request(0, 0.0, 100.0), _request(1, 90.0, 1.0)
    queue.push(costly)
    queue.push(cheap)
    assert queue.peek(90.5) is costly
    assert queue.peek(95.0) is cheap
    queue.remove(1)
    assert queue.peek(95.0) is costly


def test_hrrn_gives_every_third_slot_to_the_oldest_if_asked_to() -> None:
    queue = RatioQueue(lambda req: req.expected, share_every=3)
    assert queue.peek(0.0) is None
    costly = _request(0, 0.0, 1e9)
    queue.push(costly)
    for id in range(1, 6):
        queue.push(_request(id, 1.0, 1.0))
    taken = []
    while (req := queue.peek(2.0)) is not None:
        assert queue.forbids_backfill(2.0) == (len(taken) % 3 == 2)
        queue.admit(req)
        taken.append(req.id)
    assert taken == [1, 2, 0, 3, 4, 5]


def test_hrrn_is_first_come_first_served_among_equals() -> None:
    assert order([Job(0.1 * i, 16, 30) for i in range(6)], HighestRatioNext) == list(range(6))


def test_hrrn_starves_no_request() -> None:
    short = [Job(0.2 * i, 10, 10, expected=10.0) for i in range(1, 200)]
    place = order([Job(0.0, 10, 2), Job(0.01, 10, 100, expected=100.0), *short], HighestRatioNext).index(1)
    assert place < 60


def test_lpm_takes_the_request_with_the_longest_cached_prefix() -> None:
    rig = Rig(num_blocks=32, rows=1, policy=LongestPrefixMatch(share_every=0))
    rig.add([*PREFIX, 99], max_tokens=2)
    while rig.scheduler.has_work:
        rig.step()
    rig.add([50, 51, 52], max_tokens=2)
    half = rig.add([*PREFIX[:4], 70, 71], max_tokens=2)
    whole = rig.add([*PREFIX, 60], max_tokens=2)
    rig.drain()
    rig.verify()
    ends = list(rig.outcomes)
    assert ends[1:] == [whole.id, half.id, half.id - 1]


def test_lpm_looks_again_when_a_block_is_published() -> None:
    rig = Rig(num_blocks=32, rows=1, policy=LongestPrefixMatch(share_every=0))
    first = rig.add([*PREFIX, 99], max_tokens=6)
    unrelated = rig.add([50, 51, 52], max_tokens=2)
    sharer = rig.add([*PREFIX, 60], max_tokens=2)
    rig.drain()
    assert list(rig.outcomes) == [first.id, sharer.id, unrelated.id]


def test_lpm_finds_the_first_few_behind_many_that_left() -> None:
    queue = PrefixQueue(lambda _: 0, quantum=100.0, share_every=0)
    for id in range(60):
        queue.push(_request(id, float(id), 1.0))
    for id in range(1, 36):
        queue.remove(id)
    assert [req.id for req in queue.first(4, 0.0)] == [0, 36, 37, 38]


def test_lpm_passes_over_a_tenant_whose_deficit_is_used_up() -> None:
    rig = Rig(num_blocks=64, rows=1, policy=LongestPrefixMatch(quantum=20.0, share_every=0))
    for i in range(6):
        rig.add([*PREFIX, 100 + i], max_tokens=2, tenant="ann")
    poor = rig.add([50, 51, 52], max_tokens=2, tenant="bob")
    rig.drain()
    assert list(rig.outcomes).index(poor.id) < 4


def test_lpm_goes_on_when_one_request_outweighs_many_rounds() -> None:
    rig = Rig(num_blocks=64, rows=2, tokens=64, policy=LongestPrefixMatch(quantum=1.0, share_every=0))
    for i in range(5):
        rig.add(list(range(40 * i, 40 * i + 40)), max_tokens=4)
    rig.drain()
    rig.verify()
    assert len(rig.outcomes) == 5


def _of(tenant: str, id: int) -> Request:
    return Request(id, [1] * 4, SamplingParams(), arrival=float(id), tenant=tenant)


def _admit(queue: PrefixQueue, cost: float) -> str:
    req = queue.peek(0.0)
    assert req is not None
    queue.admit(req)
    queue.charge(req.account, cost)
    return req.tenant


@pytest.mark.parametrize("cost", [10.0, 1000.0], ids=["with some deficit left", "in debt"])
def test_lpm_forgets_the_tenants_that_neither_wait_nor_came_lately(cost: float) -> None:
    queue = PrefixQueue(lambda _: 0, quantum=100.0, share_every=0)
    for id in range(3 * MOST_DEBTS):
        queue.push(_of(f"t{id}", id))
        assert _admit(queue, cost) == f"t{id}"
    assert len(queue._tenants) <= MOST_DEBTS
    assert len(queue._parked) <= 64


def test_lpm_forgets_those_that_gave_up_waiting_for_a_quantum() -> None:
    queue = PrefixQueue(lambda _: 0, quantum=100.0, share_every=0)
    for id in range(3 * MOST_DEBTS):
        queue.push(_of(f"t{id}", 2 * id))
        queue.charge(_of(f"t{id}", 0).account, 1000.0)
        queue.push(_of(f"t{id}", 2 * id + 1))
        queue.remove(2 * id)
        queue.remove(2 * id + 1)
    assert len(queue._tenants) <= MOST_DEBTS
    assert len(queue._parked) <= 64


def test_lpm_remembers_the_debt_of_a_tenant_that_waits_no_more() -> None:
    queue = PrefixQueue(lambda _: 0, quantum=100.0, share_every=0)
    queue.push(_of("ann", 0))
    assert _admit(queue, 350.0) == "ann"
    queue.push(_of("ann", 1))
    for id in range(2, 12):
        queue.push(_of("bob", id))
    # Whenever bob has used up a quantum both get one: ann, with 250 in debt, is able after three.
    assert [_admit(queue, 50.0) for _ in range(8)] == ["bob"] * 6 + ["ann", "bob"]


def test_lpm_saves_no_quantum_up_while_nothing_waits() -> None:
    queue = PrefixQueue(lambda _: 0, quantum=100.0, share_every=0)
    queue.push(_of("ann", 0))
    _admit(queue, 10.0)
    for id in range(1, 21):
        queue.push(_of("bob", id))
    assert [_admit(queue, 100.0) for _ in range(10)] == ["bob"] * 10
    for id in range(30, 40):
        queue.push(_of("ann", id))
    taken = [_admit(queue, 50.0) for _ in range(8)]
    assert taken.count("ann") in (3, 4, 5), "one quantum and no more before bob's turn"


def test_lpm_visits_few_of_many_tenants_when_all_get_a_new_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = PrefixQueue(lambda _: 0, quantum=100.0, share_every=0)
    for id in range(4000):
        queue.push(_of(f"t{id}", id))
        queue.push(_of(f"t{id}", 4000 + id))
    for id in range(4000):
        queue.charge(_of(f"t{id}", 0).account, 150.0)
    looks = 0
    compare = _Tenant.__getattribute__

    def counted(tenant: _Tenant, name: str) -> object:
        nonlocal looks
        looks += name == "credit"
        return compare(tenant, name)

    monkeypatch.setattr(_Tenant, "__getattribute__", counted)
    assert queue.peek(0.0) is not None
    assert 0 < looks < 10 * MOST_LOOKS
    monkeypatch.undo()
    taken = [_admit(queue, 10.0) for _ in range(8000)]
    assert len(set(taken)) == 4000, "all are seen in time"
