"""Preempt: takes slots and blocks from running requests for a more urgent one that finds none."""

from __future__ import annotations

from headway.core import admission
from headway.core.builder import PlanBuilder
from headway.core.preemption import is_protected, preempt, victim_order
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.events import PreemptReason

MAX_PREEMPTED = 8  # in one step
RETRY_AFTER = 4  # steps in which a head that found no victim does not look for one again: each look visits every row


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Preempt for the head of the queue where the policy says so."""
    if not state.policy.overrides("preempts"):
        return
    for _ in range(MAX_PREEMPTED):
        head = admission.head(state)
        if head is None or not admission.num_allowed(state, 1) or (state.num_slots and admission.fits(state, head)):
            return
        if state.has_no_victim == head.id and state.step % RETRY_AFTER:
            return
        victim = _victim(state, head)
        if victim is None:
            state.has_no_victim = head.id
            return
        preempt(state, victim, PreemptReason.PRIORITY)


def _victim(state: SchedulerState, head: Request) -> Request | None:
    """Of the running requests of the last class that have the last key, the one in `victim_order` that it preempts."""
    rank, key = state.policy.rank, state.policy.priority_victim_key
    orders = [((rank(req), key(req)), req) for req in state.rows.running() if not is_protected(state, req)]
    last = max((order for order, _ in orders), default=None)
    preempts, now = state.policy.preempts, state.now
    victims = (req for order, req in orders if order == last and preempts(head, req, now))
    return max(victims, key=lambda req: victim_order(state, req, ()), default=None)
