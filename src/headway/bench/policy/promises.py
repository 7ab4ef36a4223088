"""Two kinds of readers: three in ten were promised a token every 60 ms, the others one every 450 ms.

A step with everybody is too long for the first, and the second have time to sit steps out. Without that either the
first lose their gap, or nobody sits down who would break it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator

from headway.bench.policy import laws
from headway.bench.policy.claim import Claim
from headway.bench.policy.overload import met
from headway.bench.virtual import Job, Run, Setup, Trip, simulate
from headway.core.policy import Policy
from headway.core.request import Request
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.slo import SloAware
from headway.values.limits import Limits
from headway.values.params import Slo
from headway.values.work import Work

SEEDS, SECONDS = 3, 120.0
TIGHT, LOOSE, TTFT = 0.06, 0.45, 5.0  # seconds
RATES = (5.0, 6.0, 8.0)  # requests per second, of which the first is what can just be served
LIMITS = Limits(128, 1024)


class Wakeful(SloAware):
    """Nobody sits a step out."""

    def rests(self, now: float, work: Work) -> Collection[Request]:
        return ()

    def _spared(self, gaps: list[float], gap: float) -> float:
        return 0.0


def promises(seed: int) -> Iterator[Claim]:
    """Who gets what was promised, with and without rests, and what those in a hurry and those in none see of it."""
    for rate in RATES:
        loads = [_jobs(each, rate) for each in range(seed, seed + SEEDS)]
        runs = [_serve(SloAware, jobs) for jobs in loads]
        rested, awake = _met(runs), _met([_serve(Wakeful, jobs) for jobs in loads])
        fcfs = _met([_serve(FirstComeFirstServed, jobs) for jobs in loads])
        load = f"{rate:g} a second"
        yield Claim("promises", f"{load}, fcfs: objectives met", fcfs)
        yield Claim("promises", f"{load}, slo: objectives met", rested)
        yield Claim("promises", f"{load}, slo over fcfs", rested / fcfs, least=1.0)
        yield Claim("promises", f"{load}, slo: with rests over without", rested / awake, least=1.05)
        for name, gap in (("tight", TIGHT), ("loose", LOOSE)):
            largest = [trip.max_gap / gap for run in runs for trip in run.trips if _is_of(trip, gap)]
            what = f"{load}, slo: P99 of the largest gap of the {name}, over their promise"
            yield Claim("promises", what, laws.quantile(largest, 0.99), most=1.0)


def _met(runs: list[Run]) -> float:
    return laws.mean([met(run.trips) for run in runs])


def _is_of(trip: Trip, gap: float) -> bool:
    return trip.job.slo.itl == gap and trip.is_answered


def _jobs(seed: int, rate: float) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(
            at,
            rng.randint(300, 700),
            rng.randint(60, 200),
            slo=Slo(ttft=TTFT, itl=TIGHT if rng.random() < 0.3 else LOOSE),
        )
        for at in laws.poisson(rng, rate, SECONDS)
    ]


def _serve(policy: Callable[[], Policy], jobs: list[Job]) -> Run:
    return simulate(jobs, Setup(policy, LIMITS))
