"""Bursts: long silences, then a hundred requests within a second, as in a public hour of requests for code.

Some objectives no order can meet: of fifty requests that arrive at once and want a token within two seconds, the engine
can compute the prompts of about thirty, the shortest. `most_on_time` counts them; it is the bar for interactive
requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headway.bench.policy import reference, workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.overload import TARGET, RecordingSlo, always, met, shed_claims
from headway.bench.virtual import A100, BenchRun, Job, simulate
from headway.core.policy import Policy
from headway.policies.edf import EarliestDeadlineFirst
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.slo import SloAware
from headway.values.work import pairs_of

SEEDS, SECONDS = 3, 600.0
SPREAD = 13.0  # standard deviation of the interarrival times, over their mean


def bursts(seed: int) -> Iterator[Claim]:
    """At one and a half times what can be served on the mean, and at 1.2 times."""
    heavy = [_jobs(each, 1.5) for each in range(seed, seed + SEEDS)]
    yield Claim(
        "bursts", "most in one second over the mean", workloads.mean([_peak(jobs) for jobs in heavy]), least=10.0
    )
    fcfs = workloads.mean([met(_serve(FirstComeFirstServed, jobs).records) for jobs in heavy])
    edf = workloads.mean([met(_serve(EarliestDeadlineFirst, jobs).records) for jobs in heavy])
    recorded = [(slo := RecordingSlo(), _serve(always(slo), jobs)) for jobs in heavy]
    slo_met = workloads.mean([met(run.records) for _, run in recorded])
    yield Claim("bursts", "1.5x, fcfs: objectives met", fcfs)
    yield Claim("bursts", "1.5x, slo: objectives met", slo_met)
    yield Claim("bursts", "1.5x, slo over fcfs", slo_met / fcfs, least=3.0)
    yield Claim("bursts", "1.5x, edf, without shedding, over fcfs: not a win", edf / fcfs, most=1.2)
    yield from shed_claims("bursts", recorded)
    yield from _classes([_serve(SloAware, _jobs(each, 1.2)) for each in range(seed, seed + SEEDS)])


def _classes(runs: Sequence[BenchRun]) -> Iterator[Claim]:
    possible = served = num_interactive = lost_batch = 0
    for run in runs:
        interactive = [record for record in run.records if record.job.lane == "interactive"]
        num_interactive += len(interactive)
        possible += most_on_time([record.job for record in interactive])
        served += sum(record.is_met for record in interactive)
        lost_batch += sum(not record.is_met for record in run.records if record.job.lane == "batch")
    lost = possible - served
    yield Claim("bursts", "1.2x: interactive that any order could serve, at most", possible / num_interactive)
    yield Claim("bursts", "1.2x, slo: interactive met", served / num_interactive)
    yield Claim("bursts", "1.2x, slo: interactive met over what any order could", served / possible, least=0.8)
    part = lost_batch / (lost + lost_batch)
    yield Claim("bursts", "1.2x, slo: batch's part of the loss beyond that", part, least=0.5)


def most_on_time(jobs: Sequence[Job], seconds: Callable[[Job], float] | None = None) -> int:
    """How many of these can get their first token in time if the engine computes their prompts alone, one by one.

    All have the same TTFT objective, so deadlines are in order of arrival, and that order is optimal for any feasible
    set. When one more makes the set infeasible, drop the one without which the others end soonest: this keeps the most
    (Kise, Ibaraki and Mine, 1978). A prompt takes the time of its tokens in full steps, which is a lower bound.
    """
    seconds = seconds or _prompt_seconds
    count, end = 0, 0.0
    kept: list[tuple[float, float]] = []  # arrival and seconds, since the engine was idle last
    for job in sorted(jobs, key=lambda job: job.at):
        assert job.slo.ttft is not None
        if job.at >= end:
            count += len(kept)
            kept = []
        kept.append((job.at, seconds(job)))
        end = _end(kept)
        if end > job.at + job.slo.ttft:
            without_one = [kept[:i] + kept[i + 1 :] for i in range(len(kept))]
            kept = min(without_one, key=_end)
            end = _end(kept)
    return count + len(kept)


def _end(kept: Sequence[tuple[float, float]]) -> float:
    now = 0.0
    for at, seconds in kept:
        now = max(now, at) + seconds
    return now


def _prompt_seconds(job: Job) -> float:
    per_token = A100.tokens + A100.base / reference.TOKENS
    return per_token * job.num_prompt + A100.pairs * pairs_of(0, job.num_prompt)


def _jobs(seed: int, load: float) -> list[Job]:
    rng = random.Random(seed)
    return reference.two_classes(rng, load, SECONDS, lambda rng, rate, s: workloads.gamma(rng, rate, s, SPREAD))


def _serve(policy: Callable[[], Policy], jobs: Sequence[Job]) -> BenchRun:
    return simulate(jobs, replace(reference.engine(policy), target=TARGET))


def _peak(jobs: Sequence[Job]) -> float:
    return max(Counter(int(job.at) for job in jobs).values()) / (len(jobs) / SECONDS)
