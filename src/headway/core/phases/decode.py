"""Decode: pauses rows that may skip the step, and gives the other decoding rows the block they need next."""

from __future__ import annotations

import math

from headway.core.builder import PlanBuilder
from headway.core.preemption import ensure_blocks, victim_order
from headway.core.state import SchedulerState
from headway.values.work import Work, pairs_of


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Touch only the rows that cross into a new block, at the expense of others if blocks run out."""
    _pause(state, plan)
    due = state.rows.take_crossings(state.step)
    if len(due) > state.ledger.num_free - state.ledger.num_reserved:
        due.sort(key=lambda crossing: victim_order(state, crossing[0]))
    for req, position in due:  # some may be preempted for those before them
        if req.row >= 0 and ensure_blocks(state, req, position, position + 1, plan):
            state.rows.next_crossing(req.row, state.step, position)


def _pause(state: SchedulerState, plan: PlanBuilder) -> None:
    """Pause the rows that the policy names and resume the others, all if rows are short of memory; blocks are kept."""
    if state.rows.paused or state.policy.itl_target() < math.inf:
        tokens = min(state.rows.num_wanted, state.limits.tokens)
        work = Work(tokens, pairs_of(0, tokens), *state.rows.load(state.step), chunks=tokens > 0)
        state.rows.pause(() if plan.short else state.policy.to_pause(state.now, work), state.step, state.now)
