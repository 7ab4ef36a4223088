"""Commit: what a plan's result does. Tokens reach their requests, full blocks the cache, ended requests `finished`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.core import lifecycle
from headway.core.builder import InFlightStep
from headway.core.request import Account, Request
from headway.core.state import SchedulerState
from headway.values.events import FirstToken, Stepped
from headway.values.plan import Chunk, Emission, StepResult
from headway.values.states import Finish


def run(state: SchedulerState, step: InFlightStep, result: StepResult) -> Emission[Request]:
    """Take a result in; its tokens as columns, and what ended by it is in `state.finished`."""
    plan = step.plan
    ids, tokens = _deliver(state, step, result)
    state.costs.observe(plan.work, result.elapsed)
    if state.policy.overrides("on_tokens"):
        _charge(state, step, ids)
    lost = step.void.union(result.failed)
    logprobs = {_owner(state, step, row).id: said for row, said in result.logprobs.items() if row not in lost}
    for row, error in result.failed.items():
        if row not in step.void:
            lifecycle.finish(state, _owner(state, step, row), Finish.ERROR, error)
    for row in result.stopped:
        if row not in lost:
            lifecycle.finish(state, _owner(state, step, row), Finish.STOP)
    for row in state.rows.ends.take(plan.id):
        lifecycle.finish(state, state.at(row), Finish.LENGTH)
    for req in step.final:
        if req.id in state.ending:
            lifecycle.finish(state, req, Finish.LENGTH)
    _report(state, step, result, len(tokens))
    return Emission(ids, tokens, state.take_finished(), logprobs)


def _owner(state: SchedulerState, step: InFlightStep, row: int) -> Request:
    return step.ending.get(row) or state.at(row)


def _deliver(state: SchedulerState, step: InFlightStep, result: StepResult) -> tuple[Sequence[int], Sequence[int]]:
    """Append each token to its request; the ids and tokens that really arrived, as columns."""
    num_decode = len(step.ids)
    ids, tokens, sinks = step.ids, result.tokens[:num_decode], step.sinks
    skip = step.void.union(result.failed) if result.failed else step.void
    if skip:
        kept = [i for i, row in enumerate(step.plan.decode) if row not in skip]
        ids, tokens, sinks = [ids[i] for i in kept], [tokens[i] for i in kept], [sinks[i] for i in kept]
    for sink, token in zip(sinks, tokens, strict=True):  # the hot loop: 0.05 us per row
        sink(token)
    if not step.chunks:
        return ids, tokens
    ids, tokens, at, counts = list(ids), list(tokens), num_decode, result.counts
    for chunk, req in step.chunks:
        count = counts.get(chunk.row, 1) if chunk.samples else 0
        if chunk.row not in skip:
            arrived = _commit_chunk(state, chunk, req, result.tokens[at : at + count], step.plan.id)
            tokens += arrived
            ids += [req.id] * len(arrived)
        at += count
    return ids, tokens


def _commit_chunk(state: SchedulerState, chunk: Chunk, req: Request, tokens: Sequence[int], step: int) -> Sequence[int]:
    """One chunk's outcome: KV is present, full blocks are published, tokens are taken up to the length limit."""
    num_output, is_verified = len(req.tokens) - req.num_prompt, bool(chunk.drafts or chunk.num_drafts)
    left = req.params.max_tokens - num_output
    tokens = tokens[:left]
    req.num_computed = chunk.start + (len(tokens) if is_verified else chunk.count)
    if req.published < len(req.keys):
        lifecycle.publish(state, req)
    if not tokens:
        return tokens
    if num_output == 0:
        state.emit(FirstToken(req.id, step, state.now))
    req.tokens += tokens
    if req.needs_feedback:
        req.num_scheduled = max(req.num_scheduled, req.num_computed)
        req.draft, req.num_drafts = (), 0
        if is_verified:
            state.ledger.trim(req, req.num_computed)
        if len(tokens) == left:
            state.rows.ends.add(step, req.row)
    return tokens


def _charge(state: SchedulerState, step: InFlightStep, ids: Sequence[int]) -> None:
    """Tell the policy what each account was given in this step."""
    live, num_computed = state.live, dict[Account, int]()
    generated = Counter([live[id].account for id in ids])
    for chunk, req in step.chunks:
        num_computed[req.account] = num_computed.get(req.account, 0) + chunk.count
    for account in num_computed | generated:
        state.policy.on_tokens(account, num_computed.get(account, 0), generated[account])


def _report(state: SchedulerState, step: InFlightStep, result: StepResult, num_generated: int) -> None:
    plan = step.plan
    state.emit(
        Stepped(
            step=plan.id,
            now=state.now,
            elapsed=result.elapsed,
            num_decode=len(plan.decode),
            num_chunks=len(plan.chunks),
            num_computed=plan.work.tokens + plan.work.decode + plan.work.verify,
            num_pairs=plan.work.pairs,
            context=plan.work.context,
            num_generated=num_generated,
            num_copies=len(plan.copies),
            num_running=state.num_running,
            num_waiting=len(state.waiting),
            num_free_blocks=state.ledger.num_free,
        )
    )
