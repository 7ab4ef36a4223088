"""Prefill: shares the step's token budget among the prompts under way, in chunks.

The prompt with the fewest tokens left goes first, since it delays the others least. Every fourth chunk goes to the
oldest, so that a long prompt under a stream of short ones progresses too. More urgent classes come before less urgent
ones throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core import admission
from headway.core.budget import prefill_order
from headway.core.builder import PlanBuilder
from headway.core.policy import UNPACED
from headway.core.preemption import ensure_blocks
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.plan import Chunk, Samples

OLDEST_EVERY = 4  # chunks


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Fill `plan.room`, as far as the pacer lets each prompt have some beside those before it."""
    pacer, decode, itl = state.pacer, state.decode_work, state.policy.itl_target()
    if pacer is not None and pacer.tokens(decode, 0, itl) >= UNPACED:
        pacer = None
    for req in _in_turn(state, state.rows.wanting() if plan.room > 0 else []):
        if req.row < 0:  # preempted for a row before it
            continue
        room = plan.room
        if pacer is not None:
            work = plan.work(decode.decode, decode.context)
            room = min(room, pacer.tokens(work, req.num_scheduled, itl))
        count = _chunk_size(state, req, room)
        if count > 0 and ensure_blocks(state, req, req.num_scheduled, req.num_scheduled + count, plan):
            _add_chunk(state, req, count, plan)
            if plan.room <= 0:
                break


def _in_turn(state: SchedulerState, wanting: list[Request]) -> Iterator[Request]:
    """By `prefill_order`, but every fourth is the oldest of the most urgent class that is left."""
    rank, joined = state.policy.rank, state.rows.joined
    by_order = sorted(wanting, key=lambda req: prefill_order(state, req))
    by_age = sorted(wanting, key=lambda req: (rank(req), joined[req.row], req.arrival, req.id))
    orders, taken = (iter(by_order), iter(by_age)), set[int]()
    for _ in wanting:
        state.num_prefill_turns += 1
        order = orders[state.num_prefill_turns % OLDEST_EVERY == 0]
        req = next(req for req in order if req.id not in taken)
        taken.add(req.id)
        yield req


def _chunk_size(state: SchedulerState, req: Request, room: int) -> int:
    wanted = len(req.tokens) - req.num_scheduled
    if wanted == 1 and (req.draft or req.num_drafts):
        return min(1 + max(len(req.draft), req.num_drafts), req.params.max_tokens - req.num_output, room)
    return min(wanted, room, state.limits.chunk or wanted)


def _add_chunk(state: SchedulerState, req: Request, count: int, plan: PlanBuilder) -> None:
    start, end = req.num_scheduled, min(req.num_scheduled + count, len(req.tokens))
    num_drafts = start + count - end
    samples = Samples.NONE if end < len(req.tokens) else Samples.VERIFY if num_drafts else Samples.TOKEN
    drafts = req.draft[:num_drafts]
    plan.add_chunk(Chunk(req.row, start, count, samples, -1, drafts, num_drafts - len(drafts)), req)
    req.num_scheduled = end
    if samples:
        if not req.needs_feedback:
            state.rows.begin_decode(req, state.step)
        if req.num_output == 0:
            _fork(state, req, plan)


def _fork(state: SchedulerState, leader: Request, plan: PlanBuilder) -> None:
    """Admit the requests that share this prompt: they sample from its last position and compute nothing."""
    for req in state.waiting.take_followers(leader.id):
        has_slot = admission.num_allowed(state, state.num_slots)
        if not has_slot or not state.ledger.fork(leader, req, leader.num_prompt, admission.reserves(state)):
            state.waiting.push(req)
            continue
        state.waiting.leave(req, is_admitted=True)
        req.num_cached = leader.num_cached
        req.num_scheduled = req.num_prompt
        admission.give_row(state, req, plan, is_forked=True)
        plan.add_chunk(Chunk(req.row, req.num_scheduled, 0, Samples.TOKEN, source=leader.row), req)
        if not req.needs_feedback:
            state.rows.begin_decode(req, state.step)
