"""Expire: leases that are over, deadlines out of reach, and rows whose last token is in flight."""

from __future__ import annotations

from headway.core import lifecycle
from headway.core.builder import PlanBuilder
from headway.core.request import Request
from headway.core.state import SchedulerState


def run(state: SchedulerState, plan: PlanBuilder) -> None:
    """Take back what was lent or is used up, so that the later phases find free what is free."""
    state.waiting.waits.begin_step(state.step, state.now)
    state.waiting.blocked.begin_step(state.step)
    for id in [id for id, deadline in state.leases.items() if deadline <= state.now]:
        lifecycle.release(state, id)  # if it is HELD
        lifecycle.loaded(state, id, 0)  # if it is LOADING
    for req in state.waiting.take_expired(state.now):
        lifecycle.shed(state, req)
    state.rows.advance()
    last = state.step - 1
    for row in state.rows.ends.take(last):
        req = state.at(row)
        if req.num_computed < req.num_scheduled or req.lease_s is not None:
            state.rows.retire(row)  # its prompt is in flight too, or its blocks are to be held: commit ends it
            state.rows.ends.add(last, row)
        else:
            _end_in_flight(state, req)
    state.waiting.blocked.refill()


def _end_in_flight(state: SchedulerState, req: Request) -> None:
    """Its last token is in flight: row and blocks are given on, the token will still find its request."""
    row = req.row
    for step in state.in_flight:  # all younger than its admission: its prompt is committed
        step.ending[row] = req
    state.in_flight[-1].final.append(req)
    state.ending[req.id] = (req, row)
    req.num_computed = state.rows.num_computed(req)
    lifecycle.give_up_row(state, req)
