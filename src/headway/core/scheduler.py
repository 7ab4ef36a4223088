"""The scheduler: what runs in the next step, and what came of an earlier one.

A request has known tokens and computed ones; the difference is what it still wants. A prefill chunk, a decode step, a
resume after preemption and a verified draft are one row with another count.

`schedule` costs O(joins + leaves + block crossings + chunks), `commit` one append per decode row besides. Several plans
may be in flight: row and blocks of a request whose last token is in flight are given on at once, since plans run in
order; whatever a request gives up early is void in the plans in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core import admission, commit, lifecycle
from headway.core.builder import InFlightStep, PlanBuilder
from headway.core.memory import Ledger
from headway.core.phases import admit, decode, expire, preempt, prefill
from headway.core.policy import Gate, Pacer, Policy, PolicyContext
from headway.core.preemption import settle
from headway.core.request import Request
from headway.core.rows import Rows
from headway.core.state import SchedulerState
from headway.core.waiting import WaitingObserver, WaitingQueue
from headway.values.events import EventSink
from headway.values.limits import Limits
from headway.values.plan import Emission, StepPlan, StepResult
from headway.values.states import Finish, State
from headway.values.work import Costs

PHASES = (expire.run, preempt.run, decode.run, admit.run, prefill.run)


class Scheduler:
    """Pure: equal calls give equal plans. No plan exceeds `Limits`; a row placed in it is no victim of it."""

    def __init__(
        self,
        ledger: Ledger,
        limits: Limits,
        policy: Policy,
        *,
        sink: EventSink | None = None,
        pacer: Pacer | None = None,
        gate: Gate | None = None,
        costs: Costs | None = None,
        observer: WaitingObserver | None = None,
    ) -> None:
        costs, rows = costs or Costs(), Rows(limits.rows, ledger.block_size)
        capacity = ledger.num_blocks * ledger.block_size
        policy.attach(PolicyContext(costs, self.num_cached, rows.num_computed, limits.rows, capacity))
        waiting = WaitingQueue(ledger, rows.req, policy, observer)
        waiting.blocked.is_active = ledger.caching and not (gate is not None and gate.is_barrier)
        self.state = SchedulerState(limits, policy, ledger, rows, waiting, costs, gate, pacer, sink)
        self._plan = PlanBuilder()

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute now."""
        state, plan = self.state, self._plan
        state.now = now
        state.waiting.observer.begin(now)
        plan.short.clear()
        while True:
            plan.placed.clear()
            for phase in PHASES:
                phase(state, plan)
            has_plan = bool(plan.chunks or state.rows.num_decoding)
            if has_plan or not self._unstick():
                break
        settle(state)
        state.waiting.observer.end(now)
        return self._build() if has_plan else None

    def _build(self) -> StepPlan:
        """Hand the plan out and remember, until its result comes, to which requests its tokens belong."""
        state, built, self._plan = self.state, self._plan, PlanBuilder()
        decode, ids, sinks = state.rows.columns()
        copies, released = state.ledger.drain(state.step)
        plan = StepPlan(
            id=state.step,
            decode=decode,
            chunks=[chunk for chunk, _ in built.chunks],
            joins=built.joins,
            leaves=state.leaves,
            grows=built.grows,
            copies=copies,
            released=released,
            work=built.work(len(decode), state.rows.context(state.step))._replace(copies=len(copies)),
        )
        state.in_flight.append(InFlightStep(plan, ids, sinks, built.chunks))
        state.leaves = []
        state.step += 1
        return plan

    def _unstick(self) -> bool:
        """Nothing was planned. If nothing is in flight either, move or refuse something; True: the phases run again."""
        state = self.state
        if state.in_flight:
            return False
        if state.rows.paused.keys() - self._plan.short or state.waiting.blocked.has_ready:
            return True  # the rows that decoded were preempted, now the paused ones go on; or a source ended just now
        head = admission.head(state)
        if head is None or not admission.num_allowed(state, 1):
            return False  # a gate will open, or a request ended just now
        while lifecycle.reclaim(state, head):
            if admission.fits(state, head):
                return True
        if not state.leases:  # else one will end
            lifecycle.finish(state, head, Finish.ERROR, "the KV cache cannot hold this request")
        return not state.leases

    def commit(self, plan: StepPlan, result: StepResult, now: float | None = None) -> Emission[Request]:
        """Take a plan's result in. Results come in the order of their plans."""
        self.state.now = self.state.now if now is None else now
        step = self.state.in_flight.popleft()
        assert step.plan.id == plan.id == result.plan_id, "results must come in the order of their plans"
        self.state.ledger.plan_collected(plan.id)
        return commit.run(self.state, step, result)

    def add(self, req: Request, lease_s: float = 30.0) -> None:
        """Take a request. Raises RequestError if it can never fit; a LOADING one waits `lease_s` for its KV."""
        lifecycle.add(self.state, req, lease_s)

    def loaded(self, id: int, num_tokens: int, now: float | None = None) -> None:
        """The KV of a loading request has arrived, for so many tokens; 0 says that it never will."""
        self.state.now = self.state.now if now is None else now
        lifecycle.loaded(self.state, id, num_tokens)

    def hold(self, req: Request, blocks: Sequence[int], until: float) -> None:
        """Keep blocks for a reader outside the plans; `req` is HELD, and `release` or the time ends it."""
        lifecycle.hold(self.state, req, blocks, until)

    def release(self, id: int) -> None:
        """A held request is not needed any more."""
        lifecycle.release(self.state, id)

    def abort(self, id: int, reason: Finish = Finish.ABORT, now: float | None = None) -> Request | None:
        """End a request at once, wherever it is; returns it, or None if there was nothing to end."""
        state = self.state
        state.now = state.now if now is None else now
        req = state.live.get(id)
        if req is None or req.state is State.HELD:
            lifecycle.release(state, id)
            return None
        lifecycle.finish(state, req, reason)
        return state.finished.pop()

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call other than by abort; of a static batch, when all of it has."""
        return self.state.take_finished()

    def reconfigure(self, limits: Limits) -> None:
        """Other limits from the next plan on; rows beyond those it was made with do not exist."""
        assert limits.rows <= len(self.state.rows.req)
        self.state.limits = limits

    def num_cached(self, req: Request) -> int:
        """Prompt tokens that the cache has now."""
        return self.state.ledger.num_cached(req) * self.state.ledger.block_size

    @property
    def num_waiting(self) -> int:
        return len(self.state.waiting)

    @property
    def num_running(self) -> int:
        return self.state.num_running

    @property
    def has_work(self) -> bool:
        """True while there is something to schedule, commit or report, now or at `next_expiry`."""
        state = self.state
        return bool(state.num_running or len(state.waiting) or state.in_flight or state.leases or state.finished)

    @property
    def next_expiry(self) -> float:
        """When the next lease ends; infinite if there is none. Until then nothing but a call changes leases."""
        return min(self.state.leases.values(), default=math.inf)
