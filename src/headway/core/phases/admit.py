"""Admit: takes waiting requests into the batch, in the policy's order, while slots, tokens and KV blocks last."""

from __future__ import annotations

from headway.core import admission, lifecycle
from headway.core.blocked import MOST_MOVES
from headway.core.builder import PlanBuilder
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.states import WaitReason


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Admit until something is used up, and say what that was: it is why the others wait."""
    plan.room = admission.token_room(state)
    if (reason := _admit(state, plan)) is not None:
        state.waiting.waits.reason = reason


def _admit(state: SchedulerState, plan: PlanBuilder) -> WaitReason | None:
    num_free, num_moves, reason = state.num_slots, 0, WaitReason.SLOTS
    slots = admission.num_allowed(state, num_free)
    wanted = state.rows.num_wanted if slots else 0
    while slots > 0:
        req = admission.head(state)
        if req is None:  # what else waits waits for other protected rows' memory, or for a prefix
            if len(state.waiting.protected):
                return WaitReason.BLOCKS
            return WaitReason.PREFIX if len(state.waiting) else None
        if wanted >= plan.room and _has_partials(state, req):
            return WaitReason.TOKENS
        if admission.is_harmful(state, req):
            return WaitReason.PACING
        if num_moves == MOST_MOVES and state.num_running:  # the rest of them moves in the next step
            return reason
        if state.policy.is_infeasible(req, state.now):
            lifecycle.shed(state, req)
            num_moves, reason = num_moves + 1, WaitReason.SLOTS
        elif state.waiting.blocked.block_head(req):
            num_moves, reason = num_moves + 1, WaitReason.PREFIX
        else:
            if not admission.allocate(state, req):
                req = _backfill(state, req)
            if req is None:
                return WaitReason.BLOCKS
            _join(state, req, plan)
            wanted += len(req.tokens) - req.num_scheduled
            slots, num_free = slots - 1, num_free - 1
    return WaitReason.BARRIER if num_free else WaitReason.SLOTS


def _backfill(state: SchedulerState, head: Request) -> Request | None:
    """Where the head does not fit and the policy allows it, the first behind it that does; it has its blocks then."""
    waiting, now, policy = state.waiting, state.now, state.policy
    if policy.backfill_depth == 1 or waiting.forbids_backfill(head, now):
        return None
    for req in waiting.backfill_candidates(policy.backfill_depth, now):
        is_barred = (
            admission.is_harmful(state, req) or policy.is_infeasible(req, now) or waiting.blocked.block_head(req)
        )
        if not is_barred and admission.allocate(state, req):
            return req
    return None


def _has_partials(state: SchedulerState, req: Request) -> bool:
    """True if as many prompts are under way as may be, less urgent ones than this request not counted."""
    if len(state.rows.prefilling) < state.limits.partial:
        return False
    rank, under_way = state.policy.rank, [req for req in state.rows.wanting() if not req.wants_next]
    return sum(rank(each) <= rank(req) for each in under_way) >= state.limits.partial


def _join(state: SchedulerState, req: Request, plan: PlanBuilder) -> None:
    state.waiting.admit(req)
    req.draft, req.num_drafts = (), 0  # its table has no room for them
    req.num_scheduled = req.num_computed
    if req.num_preempted == 0:
        req.num_cached = req.num_computed
    else:
        req.num_recomputed += max(0, req.lost - req.num_computed)
    admission.give_row(state, req, plan)
    state.waiting.blocked.admitted(req)
