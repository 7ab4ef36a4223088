"""Half the memory that is needed: tokens recomputed, preemptions per request, and the order of resumption.

Preempting the request with the most computed tokens shows that the number measures what it should. The bound of three
preemptions hides part of the difference, so that comparison is made without it, and printed with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BLOCK, BenchRun, EngineSetup, Job, simulate
from headway.core.policy import Key, Policy
from headway.core.request import Request
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.events import Admitted, Event, Finished, Preempted
from headway.values.limits import Admission, Limits, Victims

SLOTS, COUNT = 32, 400
LIMITS = Limits(SLOTS, 1024)
ENDLESS = 1 << 20  # preemptions of one request: no bound


class MostComputedFirst(FirstComeFirstServed):
    """The worst choice of a victim: the request with the most tokens to recompute."""

    def victim_key(self, req: Request) -> Key:
        return (self.context.num_computed(req),)


def preemption(seed: int) -> Iterator[Claim]:
    """Answers of widely different lengths, all submitted at once; slots for 32, memory for 16."""
    jobs = _jobs(seed)
    least = _serve(jobs, LIMITS)
    last = _serve(jobs, replace(LIMITS, victims=Victims.LAST_COME))
    peak = _serve(jobs, replace(LIMITS, admission=Admission.PEAK))
    ample = simulate(jobs, EngineSetup(FirstComeFirstServed, LIMITS, num_blocks=_enough(jobs)))
    yield Claim("preemption", "memory for the longest in every slot: preemptions", float(ample.preemptions), most=0.0)
    yield Claim("preemption", "least recompute: preemptions", float(least.preemptions), least=1.0)
    yield Claim("preemption", "least recompute: share of tokens computed again", _waste(least))
    yield Claim("preemption", "last come: share of tokens computed again", _waste(last))
    yield Claim(
        "preemption",
        "least recompute over last come: tokens computed again",
        least.recomputed / last.recomputed,
        most=1.1,
    )
    ratio = least.tokens_per_s / last.tokens_per_s
    yield Claim("preemption", "least recompute over last come: throughput", ratio, least=0.97)
    yield from _worst(jobs)
    for name, run in (("least recompute", least), ("last come", last), ("peak", peak)):
        yield Claim(
            "preemption",
            f"{name}: most preemptions of one request",
            float(run.most_preemptions),
            most=float(LIMITS.preemptions),
        )
    yield Claim("preemption", "peak over optimistic: preemptions", peak.preemptions / least.preemptions, most=0.5)
    yield Claim("preemption", "peak over optimistic: throughput", peak.tokens_per_s / least.tokens_per_s, least=0.9)
    yield Claim("preemption", "new ones admitted while a preempted one waits", float(_overtakings(jobs)), most=0.0)


def _worst(jobs: list[Job]) -> Iterator[Claim]:
    """The order of victims matters, and the number shows it."""
    for bound, most_often, bar in (("at most three each", LIMITS.preemptions, None), ("no bound", ENDLESS, 1.5)):
        limits = replace(LIMITS, preemptions=most_often, victims=Victims.LAST_COME)
        last = _serve(jobs, limits).recomputed
        ratio = _serve(jobs, limits, MostComputedFirst).recomputed / last
        yield Claim("preemption", f"{bound}: most computed first over last come, tokens again", ratio, least=bar)
    least = _serve(jobs, replace(LIMITS, preemptions=ENDLESS)).recomputed
    yield Claim("preemption", "no bound: least recompute over last come, tokens again", least / last)


class OvertakingCounter:
    """Counts requests admitted for the first time while a preempted request waits."""

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
    sink = OvertakingCounter()
    simulate(jobs, EngineSetup(FirstComeFirstServed, LIMITS, num_blocks=_half(jobs)), sink=sink)
    return sink.count


def _jobs(seed: int) -> list[Job]:
    rng, jobs = random.Random(seed), []
    for _ in range(COUNT):
        num_output = min(1000, max(16, round(rng.lognormvariate(5.3, 0.8))))
        expected = workloads.noisy(rng, num_output, 0.5)
        jobs.append(Job(0.0, rng.randint(50, 400), num_output, max_tokens=1000, expected=expected))
    return jobs


def _half(jobs: list[Job]) -> int:
    """Blocks: half of what SLOTS requests need together when they end."""
    need = SLOTS * workloads.mean([job.num_prompt + job.num_output for job in jobs])
    return round(need / 2 / BLOCK)


def _enough(jobs: list[Job]) -> int:
    """Blocks: every slot may hold the longest request, and begin another block."""
    return SLOTS * (max(job.num_prompt + job.num_output for job in jobs) // BLOCK + 2)


def _serve(jobs: list[Job], limits: Limits, policy: Callable[[], Policy] = FirstComeFirstServed) -> BenchRun:
    return simulate(jobs, EngineSetup(policy, limits, num_blocks=_half(jobs)))


def _waste(run: BenchRun) -> float:
    return run.recomputed / (
        run.recomputed + sum(record.job.num_prompt + record.job.num_output for record in run.records)
    )
