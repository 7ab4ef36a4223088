"""Preempt: takes slots and blocks from running requests for a more urgent one that finds none."""

from __future__ import annotations

from headway.core import admission
from headway.core.builder import PlanBuilder
from headway.core.preemption import is_protected, preempt, victim_order
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.events import PreemptReason

MAX_PREEMPTED = 8  # in one step


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Preempt for the head of the queue where the policy says so."""
    policy = state.policy
    if not policy.overrides("preempts"):
        return
    for _ in range(MAX_PREEMPTED):
        head = admission.head(state)
        if head is None or not admission.num_allowed(state, 1) or (state.num_slots and admission.fits(state, head)):
            return
        victim = _victim(state)
        if victim is None or not policy.preempts(head, victim, state.now):
            return
        preempt(state, victim, PreemptReason.PRIORITY)


def _victim(state: SchedulerState) -> Request | None:
    """The last in `victim_order`, which is asked only about those of the last class that have the last key."""
    rank, key = state.policy.rank, state.policy.priority_victim_key
    orders = [((rank(req), key(req)), req) for req in state.rows.running() if not is_protected(state, req)]
    last = max((order for order, _ in orders), default=None)
    tied = (req for order, req in orders if order == last)
    return max(tied, key=lambda req: victim_order(state, req, ()), default=None)
