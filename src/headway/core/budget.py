"""The step's token budget: how many prompt tokens it may carry, and which prompt is probably next."""

from __future__ import annotations

from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.limits import PrefillOrder


def token_room(state: SchedulerState) -> int:
    """Prompt tokens that this step may carry, if the first of them belong to the prompt that is probably next."""
    room = state.limits.tokens - state.rows.num_decoding
    if state.pacer is None:
        return room
    first = min(state.rows.wanting(), key=lambda req: prefill_order(state, req), default=None)
    start = 0 if first is None else first.num_scheduled
    return min(room, max(1, state.pacer.tokens(state.decode_work, start, state.policy.itl_target())))


def prefill_order(state: SchedulerState, req: Request) -> tuple[int, float, int]:
    """The smallest gets the first chunk."""
    rank, joined = state.policy.rank(req), state.rows.joined[req.row]
    if state.limits.prefill is PrefillOrder.ARRIVAL:
        return rank, joined, req.id
    return rank, len(req.tokens) - req.num_scheduled, joined
