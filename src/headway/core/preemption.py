"""Preemption: takes rows and KV blocks from running requests. A row already in the plan is never a victim.

A request that was preempted `Limits.preemptions` times is protected: it is no victim while an unprotected row runs, and
the most senior protected row yields to no other. It needs no reservation then: the others give way block by block. More
protected requests are admitted beside it while all of them fit into memory together at their likely lengths. Where that
estimate fails and only protected rows are left, the youngest yields once more; from then on it is senior to those that
have not, and runs beside others that have yielded only where all of them fit at their longest: nothing yields twice.
Memory that leases have is waited for: a row that is alone with them, or whose victim has yielded, pauses till they end.
"""

from __future__ import annotations

from headway.core.builder import PlanBuilder
from headway.core.lifecycle import give_up_row, reclaim, void_in_flight
from headway.core.policy import Key
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.events import Preempted, PreemptReason
from headway.values.limits import Victims
from headway.values.states import State, WaitReason


def ensure_blocks(state: SchedulerState, req: Request, start: int, end: int, plan: PlanBuilder) -> bool:
    """Allocate KV blocks for tokens start..end-1, preempting others if needed; False: so was `req`, or it must wait."""
    while (grows := state.ledger.ensure(req, start, end)) is None:
        others = [other for other in state.rows.running() if other.row not in plan.placed]
        victim = max(others, key=lambda other: victim_order(state, other))
        if (victim is req or is_protected(state, victim)) and reclaim(state, req):
            continue
        has_yielded = victim.num_preempted > state.limits.preemptions
        is_last = has_yielded or (victim is req and is_protected(state, req))
        if is_last and plan.placed and not state.rows.is_decoding(req.row):
            return False  # in the next step other rows may be victims
        if state.leases and (has_yielded or state.rows.num_running == 1):
            plan.short.add(req.row)
            state.rows.pause_row(req, state.step, state.now)
            return False
        preempt(state, victim)
        state.had_to_preempt = True
        if victim is req:
            return False
    plan.grows += grows
    plan.placed.add(req.row)
    return True


def is_protected(state: SchedulerState, req: Request) -> bool:
    """True if it was preempted as often as allowed."""
    return req.num_preempted >= state.limits.preemptions


def victim_order(state: SchedulerState, req: Request, key: Key | None = None) -> tuple[bool, int, Key, float, int]:
    """The largest is preempted first; of protected rows the youngest of the last class that never yielded."""
    rank = state.policy.rank(req)
    if is_protected(state, req):
        return False, -req.num_preempted, (rank,), req.arrival, req.id
    if key is None:
        key = state.policy.victim_key(req)
    if state.limits.victims is Victims.LAST_COME:
        worth = req.arrival
    else:
        worth = -float(state.ledger.num_alone(req, state.rows.num_computed(req)))
    return True, rank, key, worth, req.id


def preempt(state: SchedulerState, req: Request, reason: PreemptReason = PreemptReason.MEMORY) -> None:
    """Take a running request's row and blocks away; it loses no output and comes back before new ones."""
    was_protected = is_protected(state, req)
    req.lost = num_lost = req.num_computed = state.rows.num_computed(req)
    swapped = state.ledger.swap_out(req) if state.limits.swaps and _is_swap_cheaper(state, req) else None
    void_in_flight(state, req)
    give_up_row(state, req, swapped)
    state.waiting.release_followers(req.id)
    req.num_preempted += 1
    req.num_scheduled = req.num_computed
    req.draft, req.num_drafts = (), 0
    req.move(State.WAITING)
    state.waiting.resume(req, reason, is_protected(state, req))
    if reason is PreemptReason.MEMORY:
        state.waiting.waits.reason = WaitReason.BLOCKS  # unless the admit phase, if it comes later, says otherwise
    state.emit(Preempted(req.id, state.step, state.now, num_lost, swapped is not None, reason, was_protected))


def _is_swap_cheaper(state: SchedulerState, req: Request) -> bool:
    """By what steps have shown; a copy that was never seen counts as cheap, so that one will be.

    Computing that was never seen, since every prompt came while the model was cold, does not count as free.
    """
    copies = state.costs.copy(2 * -(-req.num_computed // state.ledger.block_size))
    again = state.costs.prefill(req.num_computed)
    return not state.costs.is_ready or again <= 0.0 or copies <= again


def settle(state: SchedulerState) -> None:
    """After each step: `peak` aims at one preemption for memory in twenty steps."""
    factor = state.length_factor
    state.length_factor = min(4.0, factor * 1.05) if state.had_to_preempt else max(0.25, factor * 0.9975)
    state.had_to_preempt = False
