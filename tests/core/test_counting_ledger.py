"""The scheduler over a ledger that merely counts: the seam that `core/memory.py` says is all it needs."""

from __future__ import annotations

import random

import pytest

from counting import CountingLedger
from headway.core.ledger import KVLedger
from headway.core.memory import Ledger
from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.errors import RequestError
from headway.kv.prefix import chain_keys, chain_seed
from headway.values.events import Preempted
from headway.values.limits import Admission, Limits, Victims
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan
from headway.values.states import Finish, State
from rig import EventLog


class World:
    """A scheduler over any ledger and the null executor, `depth` plans in flight."""

    def __init__(self, ledger: Ledger, depth: int = 1, rows: int = 4, **rules: object) -> None:
        self.ledger, self.log, self.depth = ledger, EventLog(), depth
        limits = Limits(rows, 16, **rules)  # type: ignore[arg-type]
        self.scheduler = Scheduler(ledger, limits, Policy(), sink=self.log)
        self.executor = NullExecutor(Capacity(ledger.num_blocks, ledger.block_size, rows), token=7)
        self.pending: list[StepPlan] = []
        self.ended: dict[int, Finish | None] = {}
        self.now = 0.0

    def add(self, id: int, num_prompt: int, max_tokens: int, **fields: object) -> Request:
        prompt = list(range(num_prompt))
        keys = chain_keys(prompt, self.ledger.block_size, chain := chain_seed("m"))
        params = SamplingParams(max_tokens=max_tokens)
        req = Request(id, prompt, params, keys=keys, chain=chain, arrival=float(id), **fields)  # type: ignore[arg-type]
        self.scheduler.add(req)
        return req

    def step(self) -> StepPlan | None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self._note(self.scheduler.take_finished())
        if plan is not None:
            self.pending.append(plan)
            self.executor.submit(plan)
        if self.pending and (plan is None or len(self.pending) >= self.depth):
            self._note(self.scheduler.commit(self.pending.pop(0), self.executor.collect()).finished)
        return plan

    def abort(self, id: int) -> None:
        req = self.scheduler.abort(id)
        self._note([] if req is None else [req])

    def run(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_work and not self.pending:
                return
            self.step()
        raise AssertionError("no end in sight")

    def _note(self, finished: list[Request]) -> None:
        self.ended |= {req.id: req.finish for req in finished}


def test_admission_decode_preemption_finish_and_abort_come_out_in_counts() -> None:
    ledger = CountingLedger(num_blocks=6, block_size=4)
    world = World(ledger)
    first, second = world.add(1, 6, 10), world.add(2, 6, 10)  # two blocks now, four in the end: eight are too many
    third = world.add(3, 8, 2)
    world.step()
    assert (ledger.held, ledger.num_free) == ({1: 2, 2: 2, 3: 2}, 0)
    assert (first.num_computed, second.num_computed, third.num_computed) == (6, 6, 4), "sixteen tokens a step"
    world.abort(3)
    assert (ledger.held, world.ended) == ({1: 2, 2: 2}, {3: Finish.ABORT})
    for _ in range(3):
        world.step()
    assert (first.num_output, ledger.held) == (4, {1: 3, 2: 3}), "cell 8 is in the third block"
    while not world.log.of(Preempted):
        world.step()
    [preempted] = world.log.of(Preempted)
    assert (preempted.id, preempted.num_lost, preempted.is_swapped) == (2, 12, False), "cell 12 had no block"
    assert (second.state, second.num_computed, ledger.held) == (State.WAITING, 0, {1: 4})
    world.run()
    assert world.ended == {1: Finish.LENGTH, 2: Finish.LENGTH, 3: Finish.ABORT}
    assert [req.tokens[6:] for req in (first, second)] == [[7] * 10] * 2
    assert (second.num_preempted, second.num_recomputed) == (1, 12)
    assert (ledger.held, ledger.num_free, ledger.num_idle) == ({}, 6, 0)


def test_a_request_that_never_fits_is_refused_by_count() -> None:
    world = World(CountingLedger(2, 4))
    with pytest.raises(RequestError, match="the 8 tokens of the KV cache"):
        world.add(1, 8, 2)


def test_what_a_counting_ledger_has_not_is_done_without() -> None:
    """KV to come, a leader's prompt, draft tokens, a swap and a common prefix: each is computed like any other."""
    world = World(CountingLedger(32, 4), swaps=True)
    loading = world.add(1, 8, 3, state=State.LOADING)
    assert (loading.state, loading.num_computed) == (State.WAITING, 0)
    world.add(2, 8, 3)
    follower = world.add(3, 8, 3, parent=2)
    drafted = world.add(4, 5, 4, needs_feedback=True)
    world.step()
    drafted.draft = (1, 2)
    preempt(world.scheduler.state, loading)
    assert not world.log.of(Preempted)[0].is_swapped
    world.run()
    assert world.ended == dict.fromkeys((1, 2, 3, 4), Finish.LENGTH)
    assert (follower.num_cached, world.scheduler.num_cached(follower)) == (0, 0)
    assert world.ledger.num_free == 32


def _shape(plan: StepPlan | None) -> object:
    """A plan without places: what a counting ledger can say of it."""
    if plan is None:
        return None
    joins = [(join.row, join.id, join.epoch, join.start) for join in plan.joins]
    return plan.id, list(plan.decode), list(plan.chunks), joins, list(plan.leaves), plan.work


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("admission", list(Admission))
def test_plans_are_those_of_the_real_ledger_without_its_cache(admission: Admission, depth: int) -> None:
    num_preempted = 0
    for seed in range(20):
        rng = random.Random(seed)
        rules = {"admission": admission, "victims": rng.choice(list(Victims)), "spare": rng.randint(0, 2)}
        num_blocks = rng.randint(8, 16)
        ledgers = CountingLedger(num_blocks, 4), KVLedger(num_blocks, 4, caching=False)
        worlds = [World(ledger, depth, **rules) for ledger in ledgers]
        for id in range(30):
            sizes, steps, gone = (rng.randint(1, 12), rng.randint(1, 16)), rng.randint(0, 3), rng.randint(0, 60)
            for world in worlds:
                world.add(id, *sizes)
            for _ in range(steps):
                assert _shape(worlds[0].step()) == _shape(worlds[1].step()), (seed, id)
            for world in worlds:
                world.abort(gone)
            assert ledgers[0].num_free == ledgers[1].num_free - ledgers[1].num_reserved
        for world in worlds:
            world.run()
            assert len(world.ended) == 30
            assert world.ledger.num_free == num_blocks
        assert worlds[0].ended == worlds[1].ended
        num_preempted += len(worlds[0].log.of(Preempted))
    assert (num_preempted == 0) == (admission is Admission.RESERVE)
