"""Half the memory that is needed: what is computed again, who is sent back how often, and who comes back first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from headway.bench.policy import laws
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BLOCK, Job, Run, Setup, simulate
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.events import Admitted, Event, Finished, Preempted
from headway.values.limits import Admission, Limits, Victims

SEATS, COUNT = 32, 400
LIMITS = Limits(SEATS, 1024)


def preemption(seed: int) -> Iterator[Claim]:
    """Answers of widely different lengths, all there at once; seats for 32, memory for 16."""
    jobs = _jobs(seed)
    least = _serve(jobs, LIMITS)
    last = _serve(jobs, replace(LIMITS, victims=Victims.LAST_COME))
    peak = _serve(jobs, replace(LIMITS, admission=Admission.PEAK))
    ample = simulate(jobs, Setup(FirstComeFirstServed, LIMITS, num_blocks=2 * _half(jobs) + SEATS))
    yield Claim("preemption", "ample memory: preemptions", float(ample.preemptions))
    yield Claim("preemption", "least recompute: preemptions", float(least.preemptions), least=1.0)
    yield Claim("preemption", "least recompute: share of tokens computed again", _waste(least))
    yield Claim("preemption", "last come: share of tokens computed again", _waste(last))
    yield Claim(
        "preemption",
        "least recompute over last come: tokens computed again",
        least.recomputed / last.recomputed,
        most=1.0,
    )
    for name, run in (("least recompute", least), ("last come", last), ("peak", peak)):
        yield Claim(
            "preemption", f"{name}: most preemptions of one request", float(_most(run)), most=float(LIMITS.preemptions)
        )
    yield Claim("preemption", "peak over optimistic: preemptions", peak.preemptions / least.preemptions, most=0.5)
    yield Claim("preemption", "peak over optimistic: throughput", peak.tokens_per_s / least.tokens_per_s, least=0.9)
    yield Claim("preemption", "new ones seated while a preempted one waits", float(_overtakings(jobs)), most=0.0)


class Overtakings:
    """Counts those who sit down for the first time while somebody who was sent back still waits."""

    def __init__(self) -> None:
        self.count = 0
        self._back: set[int] = set()

    def emit(self, event: Event) -> None:
        if isinstance(event, Preempted):
            self._back.add(event.id)
        elif isinstance(event, Finished):
            self._back.discard(event.id)
        elif isinstance(event, Admitted):
            self._back.discard(event.id)
            self.count += bool(self._back) and not event.is_resumed


def _overtakings(jobs: list[Job]) -> int:
    sink = Overtakings()
    simulate(jobs, Setup(FirstComeFirstServed, LIMITS, num_blocks=_half(jobs)), sink=sink)
    return sink.count


def _jobs(seed: int) -> list[Job]:
    rng, jobs = random.Random(seed), []
    for _ in range(COUNT):
        num_output = min(1000, max(16, round(rng.lognormvariate(5.3, 0.8))))
        expected = laws.noisy(rng, num_output, 0.5)
        jobs.append(Job(0.0, rng.randint(50, 400), num_output, max_tokens=1000, expected=expected))
    return jobs


def _half(jobs: list[Job]) -> int:
    """Blocks: half of what as many as there are seats need together when they end."""
    need = SEATS * laws.mean([job.num_prompt + job.num_output for job in jobs])
    return round(need / 2 / BLOCK)


def _serve(jobs: list[Job], limits: Limits) -> Run:
    return simulate(jobs, Setup(FirstComeFirstServed, limits, num_blocks=_half(jobs)))


def _waste(run: Run) -> float:
    return run.recomputed / (run.recomputed + sum(trip.job.num_prompt + trip.job.num_output for trip in run.trips))


def _most(run: Run) -> int:
    return max(trip.output.preemptions for trip in run.trips if trip.output)
