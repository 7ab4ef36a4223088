"""Admission: slots, KV blocks and the step's tokens for waiting requests, within the gate and the latency target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.core.builder import PlanBuilder
from headway.core.policy import UNPACED, Pacer
from headway.core.preemption import is_protected
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.events import Admitted
from headway.values.limits import Admission, PrefillOrder
from headway.values.plan import Join
from headway.values.states import State
from headway.values.work import Work


def head(state: SchedulerState) -> Request | None:
    """The next request: a protected one, unless it has to wait for other protected rows; else the queue's head."""
    first, senior = state.waiting.peek(state.now), state.waiting.protected.peek(state.now)
    if senior is None or (first is not None and state.policy.rank(first) < state.policy.rank(senior)):
        return first
    rows = [row for row in state.rows.running() if is_protected(state, row)]
    return senior if not rows or _fit_together(state, (*rows, senior), 1.0) else first


def num_allowed(state: SchedulerState, slots: int) -> int:
    """How many of these slots the gate gives out now."""
    if state.gate is None:
        return slots
    first = head(state)
    oldest = state.now if first is None else first.arrival
    return min(slots, state.gate.num_slots(state.now, state.num_running, len(state.waiting), oldest))


def is_harmful(state: SchedulerState, req: Request) -> bool:
    """True if one more row would break the latency target or an ITL objective of a running request."""
    if not state.rows.num_running or (state.pacer is None and not state.policy.overrides("waits")):
        return False
    decode, context = state.rows.load(state.step)
    work = Work(0, 0, decode + len(state.rows.prefilling) + 1, context + len(req.tokens))
    return state.policy.waits(req, work) or (state.pacer is not None and not state.pacer.has_slot(work))


def fits(state: SchedulerState, req: Request) -> bool:
    """True if there are KV blocks for it, should there be a slot."""
    return state.ledger.could_adopt(req, _spare(state, req), reserves(state)) and _is_below_peak(state, req)


def allocate(state: SchedulerState, req: Request) -> bool:
    """Give it KV blocks for all its known tokens; False, nothing touched: it does not fit."""
    return _is_below_peak(state, req) and state.ledger.adopt(req, _spare(state, req), reserves(state))


def give_row(state: SchedulerState, req: Request, plan: PlanBuilder, is_forked: bool = False) -> None:
    """Let a request whose table is made join the batch."""
    if state.received:
        state.received.pop(req.id, None)
    row = state.rows.assign(req, state.step)
    state.rows.prefilling[row] = None
    plan.placed.add(row)
    req.move(State.RUNNING)
    tokens, table = tuple(req.tokens), tuple(req.table)
    what = req.params, req.seed, req.stop_ids, req.adapter
    plan.joins.append(Join(row, req.id, req.epoch, tokens, req.num_prompt, table, req.num_scheduled, *what))
    state.policy.on_admit(req)
    is_resumed, waited = req.num_preempted > 0, tuple(req.waited.items())
    state.emit(
        Admitted(req.id, state.step, state.now, req.num_scheduled, is_resumed, is_forked, req.num_overtaken, waited)
    )


def _spare(state: SchedulerState, req: Request) -> int:
    """Blocks that this admission must leave free."""
    if not state.rows.num_running:
        return 0
    share = min(1.0, max(0.0, state.policy.leaves_free(req)))  # in this order no share that is no number gets through
    return state.limits.spare + int(share * state.ledger.num_blocks)


def reserves(state: SchedulerState) -> bool:
    """True if requests are never preempted for memory: all blocks they can ever need are reserved."""
    return state.limits.admission is Admission.RESERVE or not state.limits.preemptions


def _is_below_peak(state: SchedulerState, req: Request) -> bool:
    if state.limits.admission is not Admission.PEAK or not state.rows.num_running:
        return True
    return _fit_together(state, (*state.rows.running(), req), state.length_factor)


def _fit_together(state: SchedulerState, requests: Sequence[Request], factor: float) -> bool:
    """True if these will never need more memory than there is at expected lengths, and those that yielded at any."""
    ledger, size, most_preempted = state.ledger, state.ledger.block_size, state.limits.preemptions
    yielded = [req.max_computed for req in requests if req.num_preempted > most_preempted]
    most = sorted((_to_come(state, req, factor) for req in requests), reverse=True)
    held = peak = 0.0
    for count, (to_come, num_tokens) in enumerate(most, 1):
        held += num_tokens + size / 2
        peak = max(peak, to_come * count + held)
    return peak <= ledger.num_blocks * size and sum(-(-longest // size) for longest in yielded) <= ledger.num_blocks


def _to_come(state: SchedulerState, req: Request, factor: float) -> tuple[float, int]:
    """Tokens it will probably still add, and those it has.

    At least a quarter of its output: lengths vary widely, and a longer answer has more to come. Twice the likely length
    if it was preempted although it was protected.
    """
    factor *= 1 + max(0, req.num_preempted - state.limits.preemptions)
    to_come = max(1.0, factor * (req.ceiling or state.ceiling_of(req)) - req.num_output, req.num_output / 4)
    return min(to_come, float(req.params.max_tokens - req.num_output)), len(req.tokens)


def token_room(state: SchedulerState) -> int:
    """Prompt tokens that this step may carry, if the first of them belong to the prompt that is probably next."""
    room, pacer = state.limits.tokens - state.rows.num_decoding, binding_pacer(state)
    if pacer is None:
        return room
    decode, prompts = state.decode_work, [req for req in state.rows.wanting() if not req.wants_next]
    first = min(prompts, key=prefill_order(state), default=None)
    start = 0 if first is None else first.num_scheduled
    num_next = decode.decode - state.rows.num_decoding  # no target holds these back
    return min(room, num_next + max(1, pacer.tokens(decode, start, state.policy.itl_target())))


def binding_pacer(state: SchedulerState) -> Pacer | None:
    """The pacer, if a latency target may bound the step."""
    pacer, itl = state.pacer, state.policy.itl_target()
    if pacer is None or pacer.tokens(Work(decode=1), 0, itl) >= UNPACED:
        return None  # there is no target: rows need not be looked at
    return None if pacer.tokens(state.decode_work, 0, itl) >= UNPACED else pacer


def prefill_order(state: SchedulerState) -> Callable[[Request], tuple[int, int, int]]:
    """The key by which the smallest gets the first chunk."""
    rank, joined = state.policy.rank, state.rows.joined
    if state.limits.prefill is PrefillOrder.ARRIVAL:
        return lambda req: (rank(req), joined[req.row], req.id)
    return lambda req: (rank(req), len(req.tokens) - req.num_scheduled, joined[req.row])
