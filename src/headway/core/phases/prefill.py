"""Prefill: shares the step's token budget among the prompts under way, in chunks.

Rows that wait for their results and have them get a token each, as rows that decode do. Then the prompt with the fewest
tokens left goes first, since it delays the others least. Every fourth chunk goes to the oldest, so that a long prompt
under a stream of short ones progresses too. More urgent prompts come before less urgent ones throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core import admission
from headway.core.builder import PlanBuilder
from headway.core.preemption import ensure_blocks
from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.values.plan import Chunk, Samples
from headway.values.work import Work

OLDEST_EVERY = 4  # chunks
_NONE, _TOKEN, _VERIFY = Samples.NONE, Samples.TOKEN, Samples.VERIFY  # a member's name takes 0.07 us to look up


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Fill `plan.room`, as far as the pacer lets each prompt have some beside those before it and what decodes."""
    pacer, itl, num_next = admission.binding_pacer(state), state.policy.itl_target(), 0
    decode = Work() if pacer is None else state.decode_work
    wanting = state.rows.wanting() if plan.room > 0 else []
    has_room = pacer is None and plan.room >= sum([len(req.tokens) - req.num_scheduled for req in wanting])
    order = sorted(wanting, key=state.policy.rank) if has_room else _in_turn(state, wanting)
    for number, req in enumerate(order, 1):
        if req.row < 0:  # preempted for a row before it
            continue
        room, num_before, is_next = plan.room, plan.num_tokens, pacer is not None and req.wants_next
        if pacer is not None:
            work = plan.work(decode.decode - plan.num_verifying, decode.context - plan.context)
            work = work._replace(tokens=work.tokens - num_next)  # these are in `decode`
            room = min(room, max(is_next, pacer.tokens(work, req.num_scheduled, itl)))
        _add_chunk(state, req, room, plan, len(wanting) - number)
        num_next += is_next * (plan.num_tokens - num_before)
        if plan.room <= 0:
            break


def _in_turn(state: SchedulerState, wanting: list[Request]) -> Iterator[Request]:
    """Rows that want a token; prompts by `prefill_order`, every fourth the oldest of the most urgent class left."""
    rank, joined = state.policy.rank, state.rows.joined
    prompts = [req for req in wanting if not req.wants_next]
    yield from sorted((req for req in wanting if req.wants_next), key=rank)
    by_order = iter(sorted(prompts, key=admission.prefill_order(state)))
    by_age = iter(sorted(prompts, key=lambda req: (rank(req), joined[req.row], req.arrival, req.id)))
    taken = set[int]()
    for _ in prompts:
        state.num_prefill_turns += 1
        order = by_order if state.num_prefill_turns % OLDEST_EVERY else by_age
        req = next(order)
        while req.id in taken:
            req = next(order)
        taken.add(req.id)
        yield req


def _add_chunk(state: SchedulerState, req: Request, room: int, plan: PlanBuilder, num_behind: int) -> None:
    """Plan what there is room for of its known tokens, or its last one and draft tokens beside one for each behind."""
    start, drafts, num_drafts = req.num_scheduled, req.draft, 0
    wanted = len(req.tokens) - start
    if drafts or req.num_drafts:
        if wanted == 1 and req.num_output:  # not with the prompt's last token: its block may be shared by forks
            most = req.params.max_tokens - req.num_output
            most = min(most - 1, max(0, room - 1 - num_behind), _draft_room(state, start + 1, num_behind))
            num_drafts = min(max(len(drafts), req.num_drafts), most)
        drafts = drafts[:num_drafts]
    count = (1 if wanted == 1 and room > 0 else min(wanted, room, state.limits.chunk or wanted)) + num_drafts
    if count <= 0 or not ensure_blocks(state, req, start, start + count, plan):
        return
    req.num_scheduled = start + count - num_drafts
    samples = _NONE if count < wanted else _VERIFY if num_drafts else _TOKEN
    plan.add_chunk(Chunk(req.row, start, count, samples, -1, drafts, num_drafts - len(drafts)), req)
    if samples:
        if not req.needs_feedback:
            state.rows.begin_decode(req, state.step + 1, req.params.max_tokens - req.num_output - 1)
        if len(req.tokens) == req.num_prompt:
            _fork(state, req, plan)


def _draft_room(state: SchedulerState, start: int, num_behind: int) -> int:
    """Draft tokens that take no block which another row needs: those in the row's last block, and in what is free."""
    if admission.reserves(state):  # the row has all its blocks set aside
        return state.limits.tokens
    size, num_free = state.ledger.block_size, state.ledger.num_free - state.ledger.num_reserved
    return -start % size + size * max(0, num_free - 1 - num_behind)


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
        plan.add_chunk(Chunk(req.row, req.num_scheduled, 0, _TOKEN, source=leader.row), req)
        if not req.needs_feedback:
            state.rows.begin_decode(req, state.step + 1, req.params.max_tokens - req.num_output - 1)
