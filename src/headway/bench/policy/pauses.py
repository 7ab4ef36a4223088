"""Two classes of ITL objectives: 60 ms for three requests in ten, 450 ms for the others.

A step with all requests exceeds the tight ITL, and loose requests have time to skip steps. Without pausing, either the
tight requests miss their ITL, or the engine admits fewer requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator

from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.overload import met
from headway.bench.virtual import BenchRun, EngineSetup, Job, JobRecord, simulate
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


class NeverPausing(SloAware):
    """Pauses no request."""

    def to_pause(self, now: float, work: Work) -> Collection[Request]:
        return ()

    def _spared(self, itls: list[float], itl: float) -> float:
        return 0.0


def pauses(seed: int) -> Iterator[Claim]:
    """Objectives met with and without pausing, and the largest ITL of tight and of loose requests."""
    for rate in RATES:
        loads = [_jobs(each, rate) for each in range(seed, seed + SEEDS)]
        runs = [_serve(SloAware, jobs) for jobs in loads]
        paused, unpaused = _met(runs), _met([_serve(NeverPausing, jobs) for jobs in loads])
        fcfs = _met([_serve(FirstComeFirstServed, jobs) for jobs in loads])
        load = f"{rate:g} a second"
        yield Claim("pauses", f"{load}, fcfs: objectives met", fcfs)
        yield Claim("pauses", f"{load}, slo: objectives met", paused)
        yield Claim("pauses", f"{load}, slo over fcfs", paused / fcfs, least=1.0)
        yield Claim("pauses", f"{load}, slo: with pausing over without", paused / unpaused, least=1.05)
        for name, itl in (("tight", TIGHT), ("loose", LOOSE)):
            largest = [record.max_itl / itl for run in runs for record in run.records if _is_of(record, itl)]
            what = f"{load}, slo: P99 of the largest ITL of the {name}, over their objective"
            yield Claim("pauses", what, workloads.quantile(largest, 0.99), most=1.0)


def _met(runs: list[BenchRun]) -> float:
    return workloads.mean([met(run.records) for run in runs])


def _is_of(record: JobRecord, itl: float) -> bool:
    return record.job.slo.itl == itl and record.is_answered


def _jobs(seed: int, rate: float) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(
            at,
            rng.randint(300, 700),
            rng.randint(60, 200),
            slo=Slo(ttft=TTFT, itl=TIGHT if rng.random() < 0.3 else LOOSE),
        )
        for at in workloads.poisson(rng, rate, SECONDS)
    ]


def _serve(policy: Callable[[], Policy], jobs: list[Job]) -> BenchRun:
    return simulate(jobs, EngineSetup(policy, LIMITS))
