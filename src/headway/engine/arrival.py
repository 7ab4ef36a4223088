"""What a request that comes now finds: the scheduler's state as the values that a forecast needs."""

from __future__ import annotations

from headway.control.forecast import Arrival, Backlog, Prefill, predict_ttft
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.values.work import Work


def forecast_ttft(scheduler: Scheduler, req: Request) -> float | None:
    """Seconds to the first token of a request that comes now; None while costs are unknown. Changes nothing."""
    backlog = scheduler.line.watch
    if not scheduler.costs.is_ready or not isinstance(backlog, Backlog):
        return None
    return predict_ttft(_look(scheduler, req), backlog, scheduler.costs)


def _look(scheduler: Scheduler, req: Request) -> Arrival:
    seating, filling, rows = scheduler.seating, scheduler.filling, scheduler.rows
    must_wait = bool(scheduler.num_waiting) or not seating.num_seats or not seating.could_sit(req)
    rank = scheduler.policy.rank
    before = [each for each in filling.wanting() if rank(each) <= rank(req)]
    return Arrival(
        num_prompt=req.num_prompt,
        num_uncached=req.num_prompt - scheduler.num_cached(req),
        key=scheduler.policy.key(req),
        must_wait=must_wait,
        preempts=must_wait and _preempts(scheduler, req),
        prefills=[Prefill(each.planned, len(each.tokens) - each.planned) for each in before],
        decode=Work(decode=rows.num_decoding, context=rows.context(scheduler.life.step)),
        room=filling.room(),
    )


def _preempts(scheduler: Scheduler, req: Request) -> bool:
    """True if the policy lets a running request be preempted for this one."""
    displaces, now = scheduler.policy.displaces, scheduler.life.now
    is_asked = type(scheduler.policy).displaces is not Policy.displaces
    return is_asked and any(displaces(req, victim, now) for victim in scheduler.rows.running())
