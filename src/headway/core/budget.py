"""The step's token budget: how many prompt tokens it may carry, and which prompt is probably next."""

from __future__ import annotations

from collections.abc import Callable

from headway.core.policy import UNPACED
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.limits import PrefillOrder


def token_room(state: SchedulerState) -> int:
    """Prompt tokens that this step may carry, if the first of them belong to the prompt that is probably next."""
    room = state.limits.tokens - state.rows.num_decoding
    if not is_paced(state):
        return room
    assert state.pacer is not None
    first = min(state.rows.wanting(), key=prefill_order(state), default=None)
    start = 0 if first is None else first.num_scheduled
    return min(room, max(1, state.pacer.tokens(state.decode_work, start, state.policy.itl_target())))


def is_paced(state: SchedulerState) -> bool:
    """True if a latency target may bound the step."""
    return state.pacer is not None and state.pacer.tokens(state.decode_work, 0, state.policy.itl_target()) < UNPACED


def prefill_order(state: SchedulerState) -> Callable[[Request], tuple[int, int, int]]:
    """The key by which the smallest gets the first chunk."""
    rank, joined = state.policy.rank, state.rows.joined
    if state.limits.prefill is PrefillOrder.ARRIVAL:
        return lambda req: (rank(req), joined[req.row], req.id)
    return lambda req: (rank(req), len(req.tokens) - req.num_scheduled, joined[req.row])
