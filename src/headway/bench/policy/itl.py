"""Long prompts among short ones: the ITL of the requests that decode meanwhile.

Ten requests of 200 tokens in and out to one of 8,000 in and 100 out. Pooled over all tokens, stalls are too rare
to show; the largest ITL of each request shows them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BenchRun, EngineSetup, Job, JobRecord, simulate
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Limits, PrefillOrder

SECONDS, RATE = 600.0, 1.6
LONG = 8000
TARGET = 0.1
UNBOUND = 1 << 14  # tokens in a step: a whole prompt, and what comes with it
LIMITS = Limits(128, UNBOUND)


def itl(seed: int) -> Iterator[Claim]:
    """Chunks, a target, the order of prompts; then nine tenths of what the engine can do."""
    jobs = _mix(seed, RATE)
    yield from _chunks(jobs)
    yield from _order(jobs)
    yield from _near_capacity(seed)


def _chunks(jobs: list[Job]) -> Iterator[Claim]:
    whole = _serve(jobs, replace(LIMITS, partial=LIMITS.rows, prefill=PrefillOrder.ARRIVAL))
    chunked = _serve(jobs, replace(LIMITS, tokens=512, prefill=PrefillOrder.ARRIVAL))
    ratio = _largest(_short(whole)) / _largest(_short(chunked))
    yield Claim("itl", "whole prompts over chunks of 512: P99 of a short one's largest ITL", ratio, least=5.0)
    yield Claim(
        "itl", "chunks of 512 over whole prompts: throughput", chunked.tokens_per_s / whole.tokens_per_s, least=0.95
    )
    for name, learns in (("known", False), ("learned", True)):
        paced = _serve(jobs, LIMITS, TARGET, learns)
        yield Claim("itl", f"target, costs {name}: P95 of mixed steps over the target", _p95(paced) / TARGET, most=1.15)
        yield Claim(
            "itl",
            f"target, costs {name}: throughput over whole prompts",
            paced.tokens_per_s / whole.tokens_per_s,
            least=0.95,
        )


def _order(jobs: list[Job]) -> Iterator[Claim]:
    arrival = _serve(jobs, replace(LIMITS, prefill=PrefillOrder.ARRIVAL), TARGET)
    shortest = _serve(jobs, LIMITS, TARGET)
    short, long = _ttft(_short(shortest)) / _ttft(_short(arrival)), _ttft(_long(shortest)) / _ttft(_long(arrival))
    yield Claim("itl", "shortest prompt first over arrival: mean ttft of the short", short, most=0.3)
    yield Claim("itl", "shortest prompt first over arrival: mean ttft of the long", long, most=1.3)


def _near_capacity(seed: int) -> Iterator[Claim]:
    setup = EngineSetup(FirstComeFirstServed, LIMITS, target=TARGET)
    capacity = workloads.capacity(_mix(seed, RATE), setup)
    yield Claim("itl", "requests per second that the engine can serve of this", capacity)
    jobs = _mix(seed, 0.9 * capacity)
    for name, learns in (("known", False), ("learned", True)):
        run = _serve(jobs, LIMITS, TARGET, learns)
        yield Claim("itl", f"0.9x, costs {name}: all ITLs, P99 over P50", run.itl(0.99) / run.itl(0.5), most=2.5)
        yield Claim(
            "itl",
            f"0.9x, costs {name}: P99 of the largest ITL over the target",
            _largest(run.records) / TARGET,
            most=3.0,
        )
        yield Claim("itl", f"0.9x, costs {name}: P95 of mixed steps over the target", _p95(run) / TARGET, most=1.15)


def _mix(seed: int, rate: float) -> list[Job]:
    rng = random.Random(seed)
    times = workloads.poisson(rng, rate, SECONDS)
    return [Job(at, LONG, 100) if rng.random() < 1 / 11 else Job(at, 200, 200) for at in times]


def _serve(jobs: list[Job], limits: Limits, target: float | None = None, learns: bool = False) -> BenchRun:
    return simulate(jobs, EngineSetup(FirstComeFirstServed, limits, target=target, learns_costs=learns))


def _short(run: BenchRun) -> list[JobRecord]:
    return [record for record in run.records if record.job.num_prompt < LONG]


def _long(run: BenchRun) -> list[JobRecord]:
    return [record for record in run.records if record.job.num_prompt == LONG]


def _largest(records: list[JobRecord]) -> float:
    return workloads.quantile([record.max_itl for record in records], 0.99)


def _ttft(records: list[JobRecord]) -> float:
    return workloads.mean([record.ttft for record in records])


def _p95(run: BenchRun) -> float:
    return workloads.quantile([step.seconds for step in run.steps if step.is_mixed], 0.95)
