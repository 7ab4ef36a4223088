"""What later features enter by: adapters and namespaces, draft tokens that the device holds."""

from __future__ import annotations

import pytest

from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.kv.prefix import chain_keys, chain_seed
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.plan import Samples, StepPlan
from rig import Rig

PROMPT = list(range(12))


class NullRig:
    """The real scheduler over the null executor, one plan at a time."""

    def __init__(self, accepts: int = 0) -> None:
        self.scheduler = Scheduler(KVLedger(64, 4), Limits(4, 64), Policy())
        self.executor = NullExecutor(Capacity(64, 4, 4), accepts=accepts)
        self.plans: list[StepPlan] = []

    def add(self, id: int, chain: bytes = b"", **fields) -> Request:
        keys = chain_keys(PROMPT, 4, chain) if chain else ()
        req = Request(id, list(PROMPT), SamplingParams(max_tokens=12), chain=chain, keys=keys, **fields)
        self.scheduler.add(req)
        return req

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(float(len(self.plans)))
        assert plan is not None
        self.plans.append(plan)
        self.executor.submit(plan)
        self.scheduler.commit(plan, self.executor.collect())
        return plan

    def drain(self) -> None:
        while self.scheduler.has_work:
            if self.scheduler.num_running or self.scheduler.num_waiting:
                self.step()


def test_a_join_names_the_adapter() -> None:
    rig = NullRig()
    rig.add(1, adapter="polite")
    rig.add(2)
    assert {join.id: join.adapter for join in rig.step().joins} == {1: "polite", 2: ""}
    rig.drain()


@pytest.mark.parametrize("other", [("m", "", "", b"b"), ("m", "", "tuned", b"a"), ("m", "salt", "", b"a")])
def test_blocks_are_never_shared_across_namespaces(other: tuple[str | bytes, ...]) -> None:
    rig = NullRig()
    rig.add(1, chain_seed("m", "", "", b"a"))
    rig.drain()
    ledger = rig.scheduler.state.ledger
    assert (ledger.num_free, ledger.num_reserved, ledger.num_idle) == (64, 0, 5)
    same, stranger = rig.add(2, chain_seed("m", "", "", b"a")), rig.add(3, chain_seed(*other))
    rig.drain()
    assert (same.num_cached, stranger.num_cached) == (11, 0)


def test_a_namespace_is_not_the_text_of_another_part() -> None:
    assert chain_seed("m", "ab", b"c") != chain_seed("m", "a", b"bc")


@pytest.mark.parametrize("fields", [{"adapter": "tuned"}, {"chain": chain_seed("other")}])
def test_an_answer_with_another_adapter_or_namespace_does_not_follow(fields: dict) -> None:
    rig = NullRig()
    rig.add(1, chain_seed("m"))
    rig.add(2, **{"chain": chain_seed("m"), "parent": 1, **fields})
    rig.add(3, chain_seed("m"), parent=1)
    joins = rig.step().joins
    own = {join.id for join in joins if join.start == 0}
    assert own == ({1} if "adapter" in fields else {1, 2})
    assert {join.id for join in joins if join.start == len(PROMPT)} == {3}
    rig.drain()


@pytest.mark.parametrize("accepts", [0, 2, 5])
def test_draft_tokens_that_the_device_holds_are_verified_without_being_in_the_plan(accepts: int) -> None:
    rig = NullRig(accepts)
    req = rig.add(1, needs_feedback=True)
    rig.step()
    req.num_drafts = 3
    [chunk] = rig.step().chunks
    assert (chunk.samples, chunk.count, chunk.drafts, chunk.num_drafts) == (Samples.VERIFY, 4, (), 3)
    assert req.num_output == 2 + min(accepts, 3)
    assert len(req.table) == -(-req.num_computed // 4)
    assert req.num_drafts == 0
    rig.drain()


def test_a_preempted_request_forgets_the_draft_tokens_of_its_row() -> None:
    from headway.core.preemption import preempt

    rig = NullRig()
    req = rig.add(1, needs_feedback=True)
    rig.step()
    req.num_drafts = 3
    preempt(rig.scheduler.state, req)
    assert req.num_drafts == 0
    rig.drain()


def test_followers_share_a_prompt_only_within_a_namespace() -> None:
    rig = Rig(num_blocks=64)
    first = rig.add(PROMPT, 2, tenant="a")
    rig.add(PROMPT, 2, seed=1, tenant="b", parent=first.id)
    rig.drain()
    rig.verify()
