"""Half an hour at 1.2 times the capacity, then half of it: how long requests wait, and whether each of them ends.

Shortest first by lengths that are known badly, with a share for the oldest, against first come, first served; then
every policy with its guard on. A boost after a fixed wait is shown because it is common: under lasting overload every
request has waited that long, and the order becomes that of arrival.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from headway.bench.policy import reference, workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BenchRun, Job, JobRecord, simulate
from headway.core.policy import Policy
from headway.policies.edf import EarliestDeadlineFirst
from headway.policies.fair import Fair
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.hrrn import HighestRatioNext
from headway.policies.lpm import LongestPrefixMatch
from headway.policies.ltr import LearnedRank
from headway.policies.mlfq import MultiLevelFeedback
from headway.policies.priority import Priority
from headway.policies.sjf import ShortestJobFirst
from headway.policies.slo import SloAware
from headway.policies.srpt import ShortestRemaining

SIGMA = 1.3  # error of the predicted lengths, in the logarithm
BUSY, QUIET = 1800.0, 600.0
SHORT = 600.0  # of either, for the tour of all policies
KENDALL = 500

GUARDED: dict[str, Callable[[], Policy]] = {
    "priority, share 10": lambda: Priority(share_every=10),
    "sjf": ShortestJobFirst,
    "ltr": LearnedRank,
    "srpt": ShortestRemaining,
    "hrrn": HighestRatioNext,
    "lpm": LongestPrefixMatch,
    "edf": EarliestDeadlineFirst,
    "slo, share 10": lambda: SloAware(share_every=10),
    "fair": Fair,
    "mlfq": MultiLevelFeedback,
}


def starvation(seed: int) -> Iterator[Claim]:
    """The bar of the share lane, the collapse of the boost, and a bound on the wait of every request."""
    jobs = _jobs(seed, BUSY, QUIET)
    yield Claim("starvation", "Kendall's tau of the predicted lengths", _tau(jobs[:KENDALL]), 0.43, 0.53)
    fcfs = simulate(jobs, reference.engine(FirstComeFirstServed))
    sjf = simulate(jobs, reference.engine(ShortestJobFirst))
    bars = (
        ("mean end to end", _mean, 0.8),
        ("median ttft", _median, 0.1),
        ("P99", _p99, 2.5),
        ("max wait", _wait, 3.0),
    )
    for what, measure, most in bars:
        yield Claim(
            "starvation", f"1.2x, sjf, oldest every tenth: {what} over fcfs", _over(measure, sjf, fcfs), most=most
        )
    yield Claim("starvation", "0.5x, sjf: time to drain over fcfs", _drain(sjf) / _drain(fcfs), most=2.0)
    bare = simulate(jobs, reference.engine(lambda: ShortestJobFirst(share_every=0)))
    boost = simulate(jobs, reference.engine(lambda: ShortestJobFirst(share_every=0, boost_after=60.0)))
    yield Claim("starvation", "1.2x, sjf, no guard: max wait over fcfs", _over(_wait, bare, fcfs))
    yield Claim("starvation", "1.2x, sjf, boost after 60 s: mean end to end over fcfs", _over(_mean, boost, fcfs))
    yield from _tour(_with_classes(_jobs(seed, SHORT, SHORT), seed))


def _tour(jobs: Sequence[Job]) -> Iterator[Claim]:
    longest = _wait(simulate(jobs, reference.engine(FirstComeFirstServed)).records)
    for name, policy in GUARDED.items():
        run = simulate(jobs, reference.engine(policy))
        yield Claim(
            "starvation",
            f"{name}: requests without an end",
            float(sum(not record.finish for record in run.records)),
            most=0,
        )
        yield Claim("starvation", f"{name}: max wait over fcfs", _wait(run.records) / longest, most=3.0)


def _jobs(seed: int, busy: float, quiet: float) -> list[Job]:
    rng = random.Random(seed)
    late = reference.conversations(rng, 0.5, quiet, SIGMA)
    return reference.conversations(rng, 1.2, busy, SIGMA) + [replace(job, at=job.at + busy) for job in late]


def _with_classes(jobs: Sequence[Job], seed: int) -> list[Job]:
    """Half of them urgent, in two tenants: what could starve the other half."""
    rng = random.Random(seed + 1)
    return [
        replace(job, priority=0, slo=workloads.INTERACTIVE, tenant="ann")
        if rng.random() < 0.5
        else replace(job, priority=1, tenant="bob")
        for job in jobs
    ]


def _over(measure: Callable[[Sequence[JobRecord]], float], one: BenchRun, other: BenchRun) -> float:
    """Of the requests that arrived during the overload."""
    return measure(_busy(one)) / measure(_busy(other))


def _busy(run: BenchRun) -> list[JobRecord]:
    return [record for record in run.records if record.job.at < BUSY]


def _mean(records: Sequence[JobRecord]) -> float:
    return workloads.mean([record.total for record in records])


def _median(records: Sequence[JobRecord]) -> float:
    return workloads.quantile([record.ttft for record in records], 0.5)


def _p99(records: Sequence[JobRecord]) -> float:
    return workloads.quantile([record.total for record in records], 0.99)


def _wait(records: Sequence[JobRecord]) -> float:
    return max(record.output.timing.queued_s for record in records if record.output and record.output.timing)


def _drain(run: BenchRun) -> float:
    """Seconds from the drop of the load until every request that arrived before it has ended."""
    return max(record.end for record in _busy(run)) - BUSY


def _tau(jobs: Sequence[Job]) -> float:
    pairs = [(a.num_output - b.num_output) * (a.expected - b.expected) for a, b in combinations(jobs, 2)]
    agree, differ = sum(each > 0 for each in pairs), sum(each < 0 for each in pairs)
    return (agree - differ) / (agree + differ)
