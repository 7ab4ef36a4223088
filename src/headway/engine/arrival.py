"""What a request that comes now finds: the scheduler's state as the values that a forecast needs."""

from __future__ import annotations

from headway.control.forecast import Arrival, Backlog, Prefill, predict_ttft
from headway.core import admission
from headway.core.admission import token_room
from headway.core.request import Request
from headway.core.scheduler import Scheduler


def forecast_ttft(scheduler: Scheduler, req: Request) -> float | None:
    """Seconds to the first token of a request that comes now; None while costs are unknown. Changes nothing."""
    backlog = scheduler.state.waiting.observer
    if not scheduler.state.costs.is_ready or not isinstance(backlog, Backlog):
        return None
    return predict_ttft(_look(scheduler, req), backlog, scheduler.state.costs)


def _look(scheduler: Scheduler, req: Request) -> Arrival:
    state = scheduler.state
    must_wait = bool(len(state.waiting)) or not state.num_slots or not admission.fits(state, req)
    rank = scheduler.state.policy.rank
    before = [each for each in state.rows.wanting() if rank(each) <= rank(req)]
    return Arrival(
        num_prompt=req.num_prompt,
        num_uncached=req.num_prompt - scheduler.num_cached(req),
        key=scheduler.state.policy.key(req),
        must_wait=must_wait,
        preempts=must_wait and _preempts(scheduler, req),
        prefills=[Prefill(each.num_scheduled, len(each.tokens) - each.num_scheduled) for each in before],
        decode=state.decode_work,
        room=token_room(state),
    )


def _preempts(scheduler: Scheduler, req: Request) -> bool:
    """True if the policy lets a running request be preempted for this one."""
    policy, now = scheduler.state.policy, scheduler.state.now
    running = scheduler.state.rows.running()
    return policy.overrides("preempts") and any(policy.preempts(req, victim, now) for victim in running)
