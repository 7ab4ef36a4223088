"""How requests enter and leave: add, load, finish, release. Whatever ends a request passes `finish`.

So its row, its blocks, its place in the queue and its tokens in flight are settled in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.core.state import SchedulerState
from headway.core.waits import note_wait
from headway.errors import RequestError
from headway.values.events import Finished, Queued
from headway.values.states import Finish, State, WaitReason


def add(state: SchedulerState, req: Request, lease_s: float) -> None:
    """Take a request; one that can never fit is refused at once. A LOADING one waits outside for its KV."""
    ledger = state.ledger
    if not ledger.can_ever_hold(req):
        raise RequestError(
            f"prompt ({req.num_prompt}) plus max_tokens ({req.params.max_tokens}) needs more than the "
            f"{ledger.num_blocks * ledger.block_size} tokens of the KV cache; "
            "ask for fewer tokens or give the server more KV memory",
            param="max_tokens",
            code="context_length_exceeded",
        )
    assert req.id not in state.live, f"request {req.id} is live already"
    state.live[req.id] = req
    state.emit(Queued(req.id, req.arrival, req.num_prompt))
    if req.state is State.LOADING:
        if ledger.receive(req):
            state.leases[req.id] = max(state.now, req.arrival) + lease_s  # an idle scheduler's `now` is old
            return
        req.move(State.WAITING)  # no room to receive: compute it here
    leader = None if req.parent is None else state.live.get(req.parent)
    if leader is not None and (leader.num_scheduled >= leader.num_prompt or not leader.shares_prompt(req)):
        leader = None  # too late to share, or not the same prompt
    state.waiting.push(req, leader)


def loaded(state: SchedulerState, id: int, num_tokens: int) -> None:
    """KV for the first `num_tokens` tokens of a loading request has arrived; 0 says that it never will."""
    req = state.live.get(id)
    if req is None or req.state is not State.LOADING:
        return
    del state.leases[id]
    note_wait(req, WaitReason.LOADING, state.now)
    if num_tokens == 0:
        state.ledger.free(req)
    else:
        num_here = req.published * state.ledger.block_size  # in shared blocks, which are not computed anew
        req.num_computed = max(num_here, min(num_tokens, len(req.tokens) - 1))
        publish(state, req)
        state.received[id] = req
    req.move(State.WAITING)
    state.waiting.push(req)


def reclaim(state: SchedulerState, but: Request) -> bool:
    """Free KV that a waiting request received, the last first; it is computed here then. False: there is none."""
    req = next((req for req in reversed(state.received.values()) if req is not but), None)
    if req is None:
        return False
    del state.received[req.id]
    state.ledger.free(req)
    return True


def hold(state: SchedulerState, req: Request, blocks: Sequence[int], until: float) -> None:
    """Keep these blocks as they are for a reader outside the plans, as the table of a request that is HELD."""
    assert req.id not in state.live, f"request {req.id} is live already"
    state.ledger.hold(req, blocks)
    state.live[req.id], state.leases[req.id] = req, until


def release(state: SchedulerState, id: int) -> None:
    """The peer has what it wanted: a held request gives its blocks back."""
    req = state.live.get(id)
    if req is not None and req.state is State.HELD:
        del state.leases[id], state.live[id]
        state.ledger.free(req)
        req.move(State.DONE)


def finish(state: SchedulerState, req: Request, reason: Finish, error: str | None = None) -> None:
    """End a request wherever it is; it shows up in `finished` once."""
    holds = req.lease_s is not None and reason in (Finish.STOP, Finish.LENGTH) and req.row >= 0
    if req.state is State.WAITING:
        state.waiting.remove(req)
        state.received.pop(req.id, None)
        state.ledger.free(req)
    elif req.state is State.LOADING:
        del state.leases[req.id]
        note_wait(req, WaitReason.LOADING, state.now)
        state.ledger.free(req)
    else:
        void_in_flight(state, req)
        if req.row >= 0:
            req.num_computed = state.rows.num_computed(req)
            give_up_row(state, req, () if holds else None)
    state.waiting.release_followers(req.id)
    req.finish, req.error = reason, error
    if holds:
        req.move(State.HELD)
        state.leases[req.id] = state.now + (req.lease_s or 0.0)
    else:
        req.move(State.DONE)
        del state.live[req.id]
        req.keys = ()  # a thousand keys of an ended request are a thousand objects that garbage collection visits
    state.finished.append(req)
    state.policy.on_finish(req)
    counts = req.num_prompt, req.num_output, req.num_preempted, req.num_recomputed
    state.emit(Finished(req.id, state.now, reason.value, *counts, tuple(req.waited.items())))


def shed(state: SchedulerState, req: Request) -> None:
    """End a waiting request whose objective is out of reach."""
    finish(state, req, Finish.SHED, "its deadline could not be met any more; nothing was computed for it")


def publish(state: SchedulerState, req: Request) -> None:
    """Share what was computed, and wake the requests that were blocked on it."""
    state.waiting.blocked.published(state.ledger.publish(req), req.row)


def void_in_flight(state: SchedulerState, req: Request) -> None:
    """Tokens in flight for this request reach no request."""
    _, row = state.ending.pop(req.id, (req, req.row))
    for step in state.in_flight:
        if step.ending.get(row) is req or (req.row >= 0 and step.plan.id >= state.rows.joined[row]):
            step.void.add(row)


def give_up_row(state: SchedulerState, req: Request, published: Sequence[bytes] | None = None) -> None:
    """Leave the row and wake what this concerns; free the blocks unless the caller has, with what that published."""
    row, unsettled = req.row, req.keys[req.published :]
    state.waiting.blocked.published(state.ledger.free(req) if published is None else published, row)
    state.waiting.blocked.settle(unsettled, row)
    state.leaves.append(row)
    state.rows.vacate(req, state.step, state.now)
