"""Half the memory that is needed, and requests whose `max_tokens` far exceeds their answer: the effect must be small.

The same answers, arriving all at once or one after another, with `max_tokens` from the exact length of each answer up
to a hundred times that, and with the same large number for all. Jobs state no lengths: the engine learns them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BLOCK, BenchRun, EngineSetup, Job, simulate
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Admission, Limits

SLOTS, COUNT = 256, 1000
LONGEST, MOST = 2600, 30_000  # tokens: the longest answer, and the most that a request may declare
RATE = 12.0  # requests per second, above what half the memory can serve
LIMITS = Limits(SLOTS, 1024)
TOLERANCE = 0.05

Declare = Callable[[int], int]
DECLARED: dict[str, Declare] = {
    "3x": lambda num_output: 3 * num_output,
    "10x": lambda num_output: min(MOST, 10 * num_output),
    "100x": lambda num_output: min(MOST, 100 * num_output),
    f"{LONGEST:,} for all": lambda num_output: LONGEST,
    f"{MOST:,} for all": lambda num_output: MOST,
}


def declared(seed: int) -> Iterator[Claim]:
    """Mean end-to-end time and throughput against those of requests that declare exactly what they get."""
    for load, rate in (("burst", None), ("arrivals", RATE)):
        jobs = _jobs(seed, rate)
        for admission in (Admission.OPTIMISTIC, Admission.PEAK):
            yield from _compare(f"{admission.value}, {load}", jobs, replace(LIMITS, admission=admission))


def _compare(name: str, jobs: list[Job], limits: Limits) -> Iterator[Claim]:
    exact = _serve(jobs, limits, lambda num_output: num_output)
    yield Claim("declared", f"{name}, 1x: mean end-to-end seconds", _mean(exact))
    yield Claim("declared", f"{name}, 1x: tokens per second", exact.tokens_per_s)
    for declares, declare in DECLARED.items():
        run = _serve(jobs, limits, declare)
        about = f"{name}, {declares}"
        yield Claim("declared", f"{about}: end-to-end, of 1x", _mean(run) / _mean(exact), most=1 + TOLERANCE)
        ratio = run.tokens_per_s / exact.tokens_per_s
        yield Claim("declared", f"{about}: throughput, of 1x", ratio, least=1 - TOLERANCE)
        often = sum(record.output.preemptions > limits.preemptions for record in run.records if record.output)
        yield Claim("declared", f"{about}: preempted a fourth time", float(often), most=0.01 * COUNT)
        most = float(limits.preemptions + 1)
        yield Claim("declared", f"{about}: most preemptions of one", float(run.most_preemptions), most=most)


def _jobs(seed: int, rate: float | None) -> list[Job]:
    rng, at, jobs = random.Random(seed), 0.0, []
    for _ in range(COUNT):
        at += rng.expovariate(rate) if rate else 0.0
        num_output = min(LONGEST, max(16, round(rng.lognormvariate(5.3, 0.8))))
        jobs.append(Job(at, rng.randint(50, 400), num_output))
    return jobs


def _serve(jobs: list[Job], limits: Limits, declare: Declare) -> BenchRun:
    need = SLOTS * workloads.mean([job.num_prompt + job.num_output for job in jobs])
    asked = [replace(job, max_tokens=declare(job.num_output)) for job in jobs]
    return simulate(asked, EngineSetup(FirstComeFirstServed, limits, num_blocks=round(need / 2 / BLOCK)))


def _mean(run: BenchRun) -> float:
    return workloads.mean([record.total for record in run.records])
