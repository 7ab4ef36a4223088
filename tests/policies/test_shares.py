"""fair and lanes: shares by weight, no credit for idleness, nothing kept free, and policies that refuse them."""

from __future__ import annotations

import pytest

from headway import plugins
from headway.bench.virtual import Job
from headway.core.policy import Policy
from headway.core.request import Account, Request
from headway.errors import ConfigError
from headway.policies._shared import Laned, Shared
from headway.policies._shares import ShareQueue
from headway.policies.fair import Fair
from headway.policies.sjf import ShortestJobFirst
from headway.values.params import SamplingParams
from rig import Rig
from served import order, serve

LANES = {"interactive": 80.0, "batch": 20.0}


def _request(id: int, tenant: str) -> Request:
    return Request(id, [1], SamplingParams(), arrival=float(id), tenant=tenant)


def test_tenants_take_turns_however_many_each_sends() -> None:
    jobs = [Job(0.0, 16, 16, tenant="ann") for _ in range(6)] + [Job(0.0, 16, 16, tenant="bob") for _ in range(3)]
    got = [jobs[i].tenant for i in order(jobs, Fair)]
    assert got[:6].count("bob") == 3
    assert got[6:] == ["ann"] * 3


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


def test_lanes_share_by_weight_and_lend_what_is_unused() -> None:
    def policy() -> Policy:
        return Laned(ShortestJobFirst(), fair=False, lanes=LANES)

    jobs = [Job(0.0, 16, 16, lane="batch" if i % 2 else "interactive") for i in range(100)]
    first = [jobs[i].lane for i in order(jobs, policy)][:50]
    assert first.count("batch") == pytest.approx(10, abs=1)
    alone = [Job(0.0, 16, 16, lane="batch") for _ in range(20)]
    assert serve(alone, policy, slots=4).makespan == serve(alone, Policy, slots=4).makespan


def test_lanes_hold_tenants_which_hold_the_order_of_the_policy() -> None:
    def policy() -> Policy:
        return Laned(ShortestJobFirst(share_every=0), lanes={"one": 50.0, "two": 50.0})

    long, short = 100, 10
    jobs = [Job(0.0, 16, n, lane="one", tenant=t, expected=float(n)) for t in ("ann", "bob") for n in (long, short)]
    assert order(jobs, policy) == [1, 3, 0, 2]


def _laned() -> Laned:
    return Laned(Policy(), fair=False, lanes=LANES)


def test_a_request_without_a_slot_preempts_in_a_lane_above_its_share() -> None:
    batch = [Job(0.0, 64, 400, lane="batch") for _ in range(20)]
    late = [Job(2.0, 64, 10, lane="interactive")]
    run, patient = serve(batch + late, _laned, slots=4), serve(batch + late, Policy, slots=4)
    assert run.records[-1].ttft < 0.1 * patient.records[-1].ttft
    assert run.preemptions == 1
    assert all(record.num_tokens == record.job.num_output for record in run.records)
    assert run.makespan < 1.02 * patient.makespan


def test_a_lane_preempts_only_a_lane_that_was_paid_more_than_its_victims_cost() -> None:
    policy = _laned()
    queue = policy.queue()
    assert isinstance(queue, ShareQueue)
    one, two, other = (
        Request(id, [1] * 100, SamplingParams(), lane=lane) for id, lane in enumerate(("interactive", "batch", "batch"))
    )
    for req in (one, two, other):
        queue.push(req)
    assert not policy.preempts(one, two, 0.0), "neither lane has had anything"
    queue.charge(two.account, 100.0)
    assert not policy.preempts(one, two, 0.0), "it is the victim's own prompt that was paid for"
    queue.charge(two.account, 1.0)
    assert policy.preempts(one, two, 0.0)
    assert not policy.preempts(two, one, 0.0)
    assert not policy.preempts(other, two, 0.0)
    two.tokens += [7] * 10
    assert not policy.preempts(one, two, 0.0), "its answer counts too"
    queue.charge(two.account, 20.0)
    assert policy.preempts(one, two, 0.0)


def test_a_preempted_request_resumes_in_its_lane_though_the_other_never_ends() -> None:
    batch = [Job(0.0, 64, 200, lane="batch") for _ in range(4)]
    endless = [Job(1.0 + 0.05 * i, 64, 20, lane="interactive") for i in range(2000)]
    run = serve(batch + endless, _laned, slots=4)
    assert run.preemptions > 0
    assert max(record.end for record in run.records[:4]) < 0.7 * run.makespan


@pytest.mark.parametrize("name", ["srpt", "mlfq", "lpm", "priority"])
def test_policies_of_the_whole_queue_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' orders all waiting requests together.*take fcfs, sjf"):
        Shared(plugins.load("policies", name)(), name=name)


@pytest.mark.parametrize("name", ["fcfs", "sjf", "ltr", "edf", "slo", "hrrn"])
def test_other_policies_work_within_shares(name: str) -> None:
    def policy() -> Policy:
        return Laned(plugins.load("policies", name)(), name=name, lanes={"a": 1.0, "b": 1.0})

    jobs = [Job(0.1 * i, 16, 8, lane="a" if i % 2 else "b", tenant=str(i % 3)) for i in range(20)]
    assert all(record.is_answered for record in serve(jobs, policy, slots=2).records)


class Recording(Policy):
    """Records every call."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def on_admit(self, req: Request) -> None:
        self.said.add("admit")

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        self.said.add("tokens")

    def on_finish(self, req: Request) -> None:
        self.said.add("finish")


def test_a_policy_within_shares_gets_every_event() -> None:
    base = Recording()
    rig = Rig(policy=Shared(base))
    rig.add([1] * 9, 4)
    rig.drain()
    assert base.said == {"admit", "tokens", "finish"}


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tenant_whose_requests_are_blocked_on_a_prefix_is_not_idle(is_shared: bool) -> None:
    policy = Shared(Policy(), weights={"ann": 3.0, "bob": 1.0})
    rig = Rig(num_blocks=3000, block_size=4, rows=2, tokens=8, policy=policy)
    live: dict[str, list[Request]] = {"ann": [], "bob": []}
    seen = 0
    for _ in range(1500):
        queued = {tenant: [req for req in live[tenant] if req.finish is None and req.row < 0] for tenant in live}
        for i in range(0 if queued["ann"] else 4):  # four at a time, with a prefix that no other batch has
            seen += 1 if i == 0 or not is_shared else 0
            live["ann"].append(rig.add([seen % 50, seen // 50] * 16 + [i], 6, tenant="ann"))
        for i in range(4 - len(queued["bob"])):
            seen += 1
            live["bob"].append(rig.add([seen % 50, seen // 50, 50 + i] * 11, 6, tenant="bob"))
        rig.step()
    service = {
        tenant: sum(req.num_prompt - 0.9 * req.num_cached + 2 * req.num_output for req in requests if req.finish)
        for tenant, requests in live.items()
    }
    assert service["ann"] / service["bob"] >= 1.9  # while its prefix is computed, the other has what it cannot use


@pytest.mark.parametrize("has_lanes", [False, True])
def test_a_tenant_with_one_request_does_not_wait_for_hundreds_that_woke_with_it(has_lanes: bool) -> None:
    policy = Laned(Policy(), lanes=LANES) if has_lanes else Shared(Policy())
    rig = Rig(num_blocks=600, block_size=4, rows=4, tokens=16, policy=policy)
    prefix = [7] * 32
    many = {"tenant": "ann", "lane": "interactive"}
    rig.add([*prefix, 1], 2, salt="shared", **many)
    rig.step()
    for i in range(400):
        rig.add([*prefix, 2, i % 50, i // 50], 2, salt="shared", **many)
    lone = rig.add([*prefix, 3], 2, salt="shared", **(many | ({"lane": "batch"} if has_lanes else {"tenant": "bob"})))
    assert len(rig.scheduler.state.waiting.blocked) == 401
    for _ in range(30):
        rig.step()
    assert lone.finish is not None
