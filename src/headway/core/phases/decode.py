"""Decode: pauses rows that may skip the step, and gives the other decoding rows the block they need next."""

from __future__ import annotations

import math

from headway.core.builder import PlanBuilder
from headway.core.preemption import ensure_blocks, victim_order
from headway.core.state import SchedulerState
from headway.values.work import Work, pairs_of


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Touch only the rows that cross into a new block, at the expense of others if blocks run out."""
    _pause(state)
    rows, step, ensure = state.rows, state.step, state.ledger.ensure
    due = rows.crossings.take(step)
    if len(due) > state.ledger.num_free - state.ledger.num_reserved:
        due.sort(key=lambda row: victim_order(state, state.at(row)))
    for row in due:
        if not rows.is_decoding(row):  # has sampled its last token, or was preempted a moment ago
            continue
        position, req = rows.position(row, step), state.at(row)
        grows = ensure(req, position, position + 1)  # nearly always there is a block
        if grows is not None:
            plan.grows += grows
            plan.placed.add(row)
        elif not ensure_blocks(state, req, position, position + 1, plan):
            continue
        rows.next_crossing(row, step, position)


def _pause(state: SchedulerState) -> None:
    """Rows that the policy names skip this step, the others go on; their cells stay theirs."""
    if state.rows.paused or state.policy.itl_target() < math.inf:
        tokens = min(state.rows.num_wanted, state.limits.tokens)
        work = Work(tokens, pairs_of(0, tokens), *state.rows.load(state.step), chunks=tokens > 0)
        state.rows.pause(state.policy.to_pause(state.now, work), state.step, state.now)
