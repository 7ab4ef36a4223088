"""Caps: one request or tenant cannot keep the others from slots while they wait, and alone it still has all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from conformance import CHECKS, maker
from headway.bench.virtual import A100, BenchRun, Job
from headway.control.costs import CostModel
from headway.core.policy import Policy, PolicyContext
from headway.core.queue import OrderedQueue
from headway.core.request import Request
from headway.policies._caps import MOST_PARKED, Capped, CappedQueue
from headway.values.params import SamplingParams
from served import serve

SLOTS = 64
FAIR = [False, True]


def hog(tenant: str = "hog", group: int = 1_000_000) -> list[Job]:
    """64 prompts with 6 answers each, of 400 tokens."""
    return [Job(0.0, 32, 400, tenant=tenant, group=group) for _ in range(64 * 6)]


def victims(tenant: str | None = None) -> list[Job]:
    """Six clients, a request every two seconds each."""
    return [
        Job(
            1.0 + 2.0 * turn + 0.3 * who,
            64,
            24,
            tenant=f"victim-{who}" if tenant is None else tenant,
            group=1 + turn * 6 + who,
        )
        for turn in range(10)
        for who in range(6)
    ]


def ttfts(run: BenchRun) -> list[float]:
    return sorted(record.ttft for record in run.records if record.job.group != 1_000_000)


def p95(run: BenchRun) -> float:
    found = ttfts(run)
    return found[int(0.95 * (len(found) - 1))]


def capped(fair: bool) -> Callable[[], Policy]:
    return lambda: Capped(maker("fcfs", fair=fair)(), SLOTS)


@pytest.mark.parametrize("tenant", [None, "hog"], ids=["other tenants", "same tenant"])
@pytest.mark.parametrize("fair", FAIR, ids=["fcfs", "fair"])
def test_a_request_of_a_thousand_answers_hardly_delays_the_others(fair: bool, tenant: str | None) -> None:
    alone = serve(victims(tenant), capped(fair), slots=SLOTS)
    beside = serve(hog() + victims(tenant), capped(fair), slots=SLOTS)
    assert p95(beside) <= 2 * p95(alone)
    uncapped = serve(hog() + victims(tenant), maker("fcfs", fair=fair), slots=SLOTS)
    assert p95(uncapped) > 20 * p95(alone)  # what it is without caps: the check can fail


@pytest.mark.parametrize("fair", FAIR, ids=["fcfs", "fair"])
def test_a_tenant_of_many_requests_hardly_delays_other_tenants(fair: bool) -> None:
    crowd = [Job(0.0, 32, 400, tenant="hog", group=1_000_000) for _ in range(SLOTS)]
    crowd += [Job(0.001 * i, 32, 400, tenant="hog", group=2_000_000 + i) for i in range(400)]
    beside = serve(crowd + victims(), capped(fair), slots=SLOTS)
    found = sorted(record.ttft for record in beside.records if record.job.tenant != "hog")
    assert found[int(0.95 * (len(found) - 1))] <= 2.5 * p95(serve(victims(), capped(fair), slots=SLOTS))


@pytest.mark.parametrize("fair", FAIR, ids=["fcfs", "fair"])
def test_a_hog_alone_has_every_slot(fair: bool) -> None:
    alone = serve(hog(), capped(fair), slots=SLOTS)
    assert alone.makespan == serve(hog(), maker("fcfs", fair=fair), slots=SLOTS).makespan
    assert alone.preemptions == 0


def test_two_hogs_share_and_do_not_preempt_each_other_in_turns() -> None:
    run = serve([*hog("ann", 1), *hog("bob", 2)], capped(False), slots=SLOTS)
    assert all(record.finish == "length" for record in run.records)
    assert run.preemptions <= SLOTS // 2
    first = [record.job.tenant for record in sorted(run.records, key=lambda record: record.end)[: SLOTS * 4]]
    assert 0.3 <= first.count("ann") / len(first) <= 0.7


def test_backfill_passes_no_cap() -> None:
    policy = Capped(maker("sjf")(), 4)
    policy.attach(PolicyContext(CostModel(A100)))
    queue = policy.queue()

    def request(id: int, tenant: str) -> Request:
        return Request(id, [1] * 10, SamplingParams(max_tokens=4), tenant=tenant, group=id)

    for id in range(2):  # half of the slots
        running = request(id, "hog")
        queue.push(running)
        running.row = id
        policy.on_admit(running)
        queue.admit(running)
    for id, tenant in ((2, "hog"), (3, "other"), (4, "hog")):
        queue.push(request(id, tenant))
    assert [req.id for req in queue.first(8, 0.0)] == [3]


class Counted:
    """A queue that counts what enters and leaves it."""

    def __init__(self, queue: OrderedQueue) -> None:
        self._queue = queue
        self.num_moves = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __getattr__(self, name: str) -> object:
        self.num_moves += name in ("push", "remove")
        return getattr(self._queue, name)


class Crowd:
    """The queue under caps where 64 of a hog's answers run, and so many wait; a time passes with each look."""

    def __init__(self, num_waiting: int, name: str = "fcfs", per_group: int = 10**9) -> None:
        self.policy = Capped(maker(name)(), SLOTS)
        self.policy.attach(PolicyContext())
        self.queue = CappedQueue(self.policy, Counted(self.policy.base.queue()))  # type: ignore[arg-type]
        self.now, self.ids = 0.0, count()
        self.requests = [self.push("hog", group=10**6 + i // per_group) for i in range(SLOTS + num_waiting)]
        for req in self.requests[:SLOTS]:
            self.admit(req)

    def push(self, tenant: str, group: int = 0) -> Request:
        id = next(self.ids)
        req = Request(id, [1] * 10, SamplingParams(max_tokens=4), arrival=float(id), tenant=tenant, group=group)
        self.queue.push(req)
        return req

    def admit(self, req: Request) -> None:
        self.queue.admit(req)
        req.row = 0
        self.policy.on_admit(req)

    def look(self) -> tuple[Request | None, int]:
        """The head at the next time, and what moved for it."""
        self.now += 1.0
        before = self.queue.queue.num_moves  # type: ignore[attr-defined]
        head = self.queue.peek(self.now)
        assert self.queue.peek(self.now) is head
        return head, self.queue.queue.num_moves - before  # type: ignore[attr-defined]


@pytest.mark.parametrize("per_group", [10**9, 1], ids=["one request", "many requests"])
@pytest.mark.parametrize("name", ["fcfs", "hrrn", "lpm", "mlfq"])
def test_no_step_sets_aside_all_that_wait_of_a_hog(name: str, per_group: int) -> None:
    crowd = Crowd(2_000, name, per_group=per_group)
    others = [crowd.push("other", group=i) for i in range(20)]
    looks, went = [], []
    for _ in range(20):
        head, num_moves = crowd.look()
        assert head is not None
        crowd.admit(head)
        crowd.policy.on_finish(head)
        looks.append(num_moves)
        went.append(head)
    assert sorted(req.id for req in went) == [req.id for req in others]
    assert max(looks) <= MOST_PARKED + 1


@pytest.mark.parametrize("name", ["fcfs", "hrrn", "lpm", "mlfq"])
def test_two_hogs_have_every_slot_while_their_answers_are_being_parked(name: str) -> None:
    crowd = Crowd(0, name)
    for req in crowd.requests:
        crowd.policy.on_finish(req)
    for i in range(2 * 1_024):
        crowd.push("hog", group=1 + i % 2)
    crowd.now += 1.0
    slots: Counter[int] = Counter()
    for _ in range(SLOTS):
        head = crowd.queue.peek(crowd.now)
        assert head is not None, f"slots that are empty: {SLOTS - slots.total()}"
        crowd.admit(head)
        slots[head.group] += 1
    assert slots == {1: SLOTS // 2, 2: SLOTS // 2}


def test_what_was_parked_first_goes_first_when_the_others_have_left() -> None:
    crowd = Crowd(1_000)
    other = crowd.push("other")
    for _ in range(3):  # some of the hog's are parked, some are not
        assert crowd.look()[0] is other
    crowd.queue.remove(other.id)
    went = []
    for _ in range(1_000):
        head, num_moves = crowd.look()
        assert head is not None
        assert num_moves <= MOST_PARKED + 1
        crowd.admit(head)
        crowd.policy.on_finish(head)
        went.append(head)
    assert went == crowd.requests[SLOTS:]
    assert not len(crowd.queue)


def test_what_was_parked_first_goes_first_when_slots_become_free() -> None:
    crowd = Crowd(1_000)
    other = crowd.push("other")
    for _ in range(3):
        assert crowd.look()[0] is other
    for req in crowd.requests[: SLOTS - 8]:
        crowd.policy.on_finish(req)
    for req in crowd.requests[SLOTS : SLOTS + 4]:
        head, _ = crowd.look()
        assert head is req
        crowd.admit(req)
        crowd.policy.on_finish(req)


def test_requests_below_their_caps_keep_the_policys_order() -> None:
    jobs = [Job(0.01 * i, 16, 40 + i % 7, tenant="ann" if i % 2 else "bob", group=i + 1) for i in range(200)]
    for name in ("fcfs", "sjf"):
        plain = serve(jobs, maker(name), slots=SLOTS)
        beside = serve(jobs, lambda name=name: Capped(maker(name)(), 10**6), slots=SLOTS)
        assert [record.first for record in plain.records] == [record.first for record in beside.records]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["fcfs", "slo", "mlfq"])
def test_caps_keep_what_all_policies_must(name: str, check: str) -> None:
    CHECKS[check](lambda: Capped(maker(name)(), 2))  # so few that tenants are over their caps all the time


def test_a_hog_that_lasts_does_not_become_immune() -> None:
    """A request that was preempted three times is protected: caps must not use that up."""
    jobs = [Job(0.0, 16, 2000, tenant="hog", group=1_000_000) for _ in range(40)]
    jobs += [Job(1.0 + 0.2 * i, 32, 8, tenant=f"victim-{i % 3}", group=1 + i) for i in range(200)]
    run = serve(jobs, lambda: Capped(maker("fcfs")(), 16), slots=16)
    late = [record.ttft for record in run.records if record.job.group != 1_000_000][-50:]
    assert max(late) < 0.3
    assert run.preemptions < 20


@pytest.mark.parametrize("slots", [1, 2, 8, 32])
def test_slots_left_for_others_are_used_again_once_they_stay_away(slots: int) -> None:
    jobs = [Job(0.0, 16, 400, tenant="hog", group=1_000_000) for _ in range(6 * slots)]
    jobs.append(Job(1.0, 16, 4, tenant="ann", group=1))
    beside = serve(jobs, lambda: Capped(maker("fcfs")(), slots), slots=slots)
    alone = serve(jobs[:-1], maker("fcfs"), slots=slots)
    assert beside.makespan <= 1.3 * alone.makespan


def test_nothing_is_kept_of_those_that_left() -> None:
    made: list[Capped] = []

    def make() -> Policy:
        made.append(Capped(maker("fcfs")(), SLOTS))
        return made[-1]

    serve(hog() + victims(), make, slots=SLOTS, num_blocks=900)  # few blocks: some are preempted for memory too
    policy = made[0]
    assert (policy._holders, policy._rows, policy._full, policy._num_tenants) == ({}, {}, {}, 0)
