"""Deadlines with sense: short work first among equally urgent, the hopeless told at once, the running protected.

- Class: how long the first token may take, by powers of two. A more urgent class goes first, takes a seat from a less
  urgent one if it must, and finds room: less urgent ones leave a share of the memory free when they sit down.
- Order within a class: deadline + beta * cost, so a long request must be more urgent to go before a short one.
- Shed: past its latest start, deadline - prefill, nothing can help a request: no token is computed for it.
- Guard: nobody sits down if a step with one more row would break the gap that somebody running was promised, and
  chunks are cut to keep it. An ITL below `least_itl`, or below 1.5 steps of a single row, is infeasible: such a request
  is served without a guard, at no cost to the others, and reported as missed.
- Rests: where a step with everybody would break the tightest gap, those who were promised twice that or more sit steps
  out, each as long as its own gap allows; so the guard counts them for a part of a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from headway.core.policy import Key
from headway.core.request import Request
from headway.policies.edf import EarliestDeadlineFirst
from headway.values.work import Work, pairs_of

MARGIN = 0.1
INFEASIBLE = 1.5  # times the step of one row
URGENT = 4.0  # seconds to the first token; who allows more leaves room for those who do not


@lru_cache(maxsize=4096)
def _class_of(seconds: float) -> int:
    """By powers of two; asked several times per step about each request that is looked at."""
    return round(math.log2(seconds))


@dataclass(slots=True)
class _ItlObjective:
    req: Request
    itl_target: float
    due: float = 0.0  # when it must be in a step again, if it was noted lately that it is in one

    @property
    def pace(self) -> float:
        return (1 - MARGIN) * self.itl_target

    def run(self, now: float) -> None:
        """It is in the step that begins now; whoever is late is due the sooner next time, so that the mean is kept."""
        begun = self.due if 0 <= now - self.due < self.pace else now
        self.due = begun + self.pace


class SloAware(EarliestDeadlineFirst):
    """`beta` says how many seconds of urgency a second of the engine is worth, `spare` what share of the memory those
    who are in no hurry leave free: preempting them for each who is would cost more than that."""

    keys_by_cache = True

    def __init__(
        self,
        *,
        beta: float = 20.0,
        spare: float = 0.15,
        least_itl: float = 0.05,
        patience: float = 30.0,
        share_every: int | None = None,
        boost_after: float | None = None,
    ) -> None:
        super().__init__(patience=patience, share_every=share_every, boost_after=boost_after)
        self.beta = beta
        self.spare = spare
        self.least_itl = least_itl  # a tighter ITL is infeasible and not guarded
        self._objectives: dict[int, _ItlObjective] = {}  # of requests that were seated and have not ended
        self._tightest = math.inf

    def key(self, req: Request) -> Key:
        return (self.rank(req), self.deadline(req) + self.beta * self._seconds(req))

    def rank(self, req: Request) -> int:
        return _class_of(self.deadline(req) - req.arrival)

    def leaves_free(self, req: Request) -> float:
        return self.spare if self.deadline(req) - req.arrival > URGENT else 0.0

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        return self.rank(req) < self.rank(victim)

    def latest_start(self, req: Request) -> float:
        costs, latest = self.context.costs, math.inf
        if req.slo.ttft is not None:
            latest = req.arrival + req.slo.ttft - self._first(req)
        if req.slo.deadline is not None:
            least = costs.step(Work(decode=1, context=req.num_prompt)) if costs.is_ready else 0.0
            answer = (req.likely_output - 1) * least
            latest = min(latest, req.arrival + req.slo.deadline - self._first(req) - answer)
        return latest

    def is_infeasible(self, req: Request, now: float) -> bool:
        return req.num_preempted == 0 and now > self.latest_start(req)

    def waits(self, req: Request, work: Work) -> bool:
        if not self.context.costs.is_ready:
            return False
        itl = self._guarded(req)
        itl_target = self._kept(min(self._tightest, itl or math.inf))
        itls = [objective.itl_target for objective in self._objectives.values() if objective.req.row >= 0]
        share = 1 - self._spared([*itls, itl or 0.0], itl_target) / work.decode
        work = work._replace(decode=math.ceil(work.decode * share), context=math.ceil(work.context * share))
        return self.context.costs.step(work) > (1 - MARGIN) * itl_target

    def _spared(self, itls: list[float], itl_target: float) -> float:
        """Rows that a step of `itl_target` seconds is without on the mean, if all rest as long as they can."""
        return sum(1 - 1 / (each // itl_target) for each in itls if each >= 2 * itl_target)

    def itl_target(self) -> float:
        is_known = self._objectives and self.context.costs.is_ready
        return (1 - MARGIN) * self._kept(self._tightest) if is_known else math.inf

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        if len(self._objectives) < 2:
            return ()
        costs, most = self.context.costs, self.itl_target()
        if costs.step(work) <= most:
            return ()
        running = [
            objective for objective in self._objectives.values() if objective.req.row >= 0 and objective.req.num_output
        ]
        loose = [objective for objective in running if objective.pace >= 2 * most]
        loose.sort(key=lambda objective: -objective.due)
        paused: list[Request] = []
        for objective in loose:
            if objective.due < now + most or costs.step(work) <= most:
                break
            paused.append(objective.req)
            work = work._replace(decode=work.decode - 1, context=work.context - len(objective.req.tokens))
        for objective in loose[len(paused) :]:
            objective.run(now)
        return paused

    def on_admit(self, req: Request) -> None:
        itl = self._guarded(req)
        if itl is not None:
            self._objectives.setdefault(req.id, _ItlObjective(req, itl))
            self._tightest = min(self._tightest, itl)

    def on_finish(self, req: Request) -> None:
        ended = self._objectives.pop(req.id, None)
        if ended is not None and ended.itl_target == self._tightest:
            self._tightest = min((objective.itl_target for objective in self._objectives.values()), default=math.inf)

    def _guarded(self, req: Request) -> float | None:
        """The ITL that this request is promised: what it asks for, None where that is nothing or infeasible.

        A tighter ITL than steps allow would be missed anyway, and short steps for it would take from all others.
        """
        itl = req.slo.itl
        return None if itl is None or itl < self._least() else itl

    def _least(self) -> float:
        return max(self.least_itl, INFEASIBLE * self.context.costs.step(Work(decode=1)))

    def _kept(self, itl_target: float) -> float:
        """The gap that is kept where this one was promised: costs may have been learned since."""
        return max(itl_target, self._least())

    def _seconds(self, req: Request) -> float:
        return self.context.request_cost(req) if self.context.costs.is_ready else 0.0

    def _first(self, req: Request) -> float:
        """Seconds to its first token if it begins at once, at least."""
        costs = self.context.costs
        if not costs.is_ready:
            return 0.0
        uncached = max(1, req.num_prompt - self.context.num_cached(req))
        return costs.step(Work(tokens=uncached, pairs=pairs_of(0, uncached), chunks=1))


PLUGIN = SloAware
