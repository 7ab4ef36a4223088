"""SLO-aware: deadlines with short work first among equally urgent requests, shedding, and a guard for ITL objectives.

- Class: the TTFT objective by powers of two. A more urgent class goes first, preempts a less urgent one if it must, and
  finds free memory: less urgent requests leave a share of it free when they are admitted.
- Order within a class: deadline + beta * cost, so a long request must be more urgent to go before a short one.
- Shed: after its latest start (deadline - prefill) a request is infeasible and is shed before any token is computed.
- Guard: no request is admitted if a step with one more row would break the ITL objective of a running request, and
  chunks are cut to keep it. An ITL below `least_itl`, or below 1.5 steps of a single row, is infeasible: such a request
  is served without a guard, at no cost to the others, and reported as missed.
- Pauses: where a step with all rows would break the tightest ITL, rows whose objective is at least twice that skip
  steps, each as long as its own objective allows; the guard counts them as a fraction of a row.
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
SOONEST = 1e-3  # seconds; beside the time of arrival the difference to a nearer deadline may be none
URGENT = 4.0  # seconds of TTFT objective; requests with more leave memory free for requests with less


@lru_cache(maxsize=4096)
def _class_of(seconds: float) -> int:
    """By powers of two; asked several times per step about each request that is looked at."""
    return round(math.log2(seconds))


@dataclass(slots=True)
class _ItlObjective:
    req: Request
    itl_target: float
    due: float = 0.0  # time by which it must be in a step again; old if it was not loose lately

    @property
    def pace(self) -> float:
        return (1 - MARGIN) * self.itl_target

    def run(self, now: float) -> None:
        """It is in the step that begins now. A late one is due sooner next time, so that its mean ITL is kept."""
        begun = self.due if 0 <= now - self.due < self.pace else now
        self.due = begun + self.pace


class SloAware(EarliestDeadlineFirst):
    """`beta`: seconds of deadline that one second of engine time is worth. `spare`: share of the memory that less
    urgent requests leave free; preempting them for each urgent one would cost more than that."""

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
        self._objectives: dict[int, _ItlObjective] = {}  # of requests that were admitted and have not ended
        self._tightest = math.inf

    def key(self, req: Request) -> Key:
        return (self.rank(req), self.deadline(req) + self.beta * self._seconds(req))

    def rank(self, req: Request) -> int:
        return _class_of(max(SOONEST, self.deadline(req) - req.arrival))

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
        if not self.context.costs.is_ready or (req.slo.itl is None and self._tightest == math.inf):
            return False
        itl = self._guarded(req)
        itl_target = self._kept(min(self._tightest, itl or math.inf))
        itls = [objective.itl_target for objective in self._objectives.values() if objective.req.row >= 0]
        share = 1 - self._spared([*itls, itl or 0.0], itl_target) / work.decode
        work = work._replace(decode=math.ceil(work.decode * share), context=math.ceil(work.context * share))
        return self.context.costs.step(work) > (1 - MARGIN) * itl_target

    def _spared(self, itls: list[float], itl_target: float) -> float:
        """Mean number of rows paused in steps of `itl_target` seconds if each pauses as long as its ITL allows."""
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
        """The ITL objective to guard: what the request asks for; None if it asks for none or it is infeasible.

        An ITL shorter than a step of this row alone would be missed anyway, and short steps for it would slow all
        others down.
        """
        itl = req.slo.itl
        return None if itl is None or itl < self._least(len(req.tokens)) else itl

    def _least(self, context: int = 0) -> float:
        return max(self.least_itl, INFEASIBLE * self.context.costs.step(Work(decode=1, context=context)))

    def _kept(self, itl_target: float) -> float:
        """The ITL that steps can keep: the cost model may have learned since the objective was accepted."""
        return max(itl_target, self._least())

    def _seconds(self, req: Request) -> float:
        return self.context.request_cost(req) if self.context.prices.is_ready else 0.0

    def _first(self, req: Request) -> float:
        """Seconds to its first token if it begins at once, at least."""
        costs = self.context.costs
        if not costs.is_ready:
            return 0.0
        uncached = max(1, req.num_prompt - self.context.num_cached(req))
        return costs.step(Work(tokens=uncached, pairs=pairs_of(0, uncached), chunks=1))


PLUGIN = SloAware
