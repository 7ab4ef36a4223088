"""Shared prefixes, and a cache too small for all of them: the order of admission decides what is still cached.

Nine of ten requests belong to one of sixty families, whose prompts share their first 2,000 tokens; memory holds about
thirty such prefixes if no request ran. The others, a tenant of their own, share no prefix: by the longest cached prefix
alone they are always last. The guards are a deficit per tenant, and every tenth admission goes to the oldest request.
The load is two and a half times what the engine serves if nothing is cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from headway.bench.policy import reference, workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BenchRun, Job, JobRecord, simulate
from headway.core.policy import Policy
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.lpm import LongestPrefixMatch

LOAD, SECONDS = 2.5, 400.0
FAMILIES, SHARED, OWN, OUTPUT = 60, 2000, 100, 100
ALONE = 0.1
ENDLESS = 1e15  # tokens that a tenant may be given in a round: no bound


def prefix(seed: int) -> Iterator[Claim]:
    """What the cache is worth in either order, and what it costs requests without a shared prefix."""
    jobs = _jobs(seed)
    fcfs, lpm = _serve(FirstComeFirstServed, jobs), _serve(LongestPrefixMatch, jobs)
    yield Claim("prefix", "fcfs: prompt tokens found in the cache, of those any cache could hold", _found(fcfs))
    yield Claim("prefix", "lpm: prompt tokens found in the cache, of those any cache could hold", _found(lpm))
    yield Claim("prefix", "lpm over fcfs: tokens found in the cache", _found(lpm) / _found(fcfs), least=1.5)
    yield Claim("prefix", "lpm over fcfs: mean ttft", _ttft(lpm.records) / _ttft(fcfs.records), most=0.5)
    yield Claim("prefix", "lpm over fcfs: throughput", lpm.tokens_per_s / fcfs.tokens_per_s, least=1.2)
    yield from _alone(jobs, fcfs, lpm)


def _alone(jobs: Sequence[Job], fcfs: BenchRun, lpm: BenchRun) -> Iterator[Claim]:
    """Requests that share no prefix."""
    bare = _serve(lambda: LongestPrefixMatch(quantum=ENDLESS, share_every=0), jobs)
    one = _serve(LongestPrefixMatch, [replace(job, tenant="") for job in jobs])
    unequal = _ttft(_unshared(bare)) / _ttft(_others(bare))
    yield Claim("prefix", "alone, no guards: mean ttft over that of families", unequal, least=1.5)
    yield Claim(
        "prefix", "alone, deficit: mean ttft over that of families", _ttft(_unshared(lpm)) / _ttft(_others(lpm))
    )
    yield Claim("prefix", "alone, deficit over no guards: max wait", _wait(lpm) / _wait(bare), most=0.5)
    yield Claim("prefix", "alone, deficit over fcfs: max wait", _wait(lpm) / _wait(fcfs), most=0.5)
    yield Claim("prefix", "alone, one tenant with all others, over fcfs: max wait", _wait(one) / _wait(fcfs), most=1.0)


@cache
def _capacity() -> float:
    """Requests per second if nothing is cached."""
    jobs = [Job(0.0, SHARED + OWN, OUTPUT) for _ in range(300)]
    return workloads.capacity(jobs, reference.engine(FirstComeFirstServed))


def _jobs(seed: int) -> list[Job]:
    rng, jobs = random.Random(seed), []
    for at in workloads.poisson(rng, LOAD * _capacity(), SECONDS):
        num_output = min(1000, max(16, round(rng.expovariate(1 / OUTPUT))))
        job = Job(at, SHARED + OWN, num_output, max_tokens=1000, tenant="alone")
        if rng.random() >= ALONE:
            job = replace(job, tenant="families", family=rng.randrange(FAMILIES), num_shared=SHARED)
        jobs.append(job)
    return jobs


def _serve(policy: Callable[[], Policy], jobs: Sequence[Job]) -> BenchRun:
    run = simulate(jobs, replace(reference.engine(policy), caches=True))
    assert all(record.is_answered for record in run.records)
    return run


def _found(run: BenchRun) -> float:
    """Of what an unbounded cache would hold: the shared prefix of every request of a family but the first."""
    members = [record.job for record in run.records if record.job.num_shared]
    possible = SHARED * (len(members) - len({job.family for job in members}))
    return sum(record.output.cached_tokens for record in run.records if record.output) / possible


def _unshared(run: BenchRun) -> list[JobRecord]:
    return [record for record in run.records if not record.job.num_shared]


def _others(run: BenchRun) -> list[JobRecord]:
    return [record for record in run.records if record.job.num_shared]


def _ttft(records: Sequence[JobRecord]) -> float:
    return workloads.mean([record.ttft for record in records])


def _wait(run: BenchRun) -> float:
    """The longest wait of a request that shares no prefix."""
    return max(record.output.timing.queued_s for record in _unshared(run) if record.output and record.output.timing)
