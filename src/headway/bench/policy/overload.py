"""Overload in two classes: the share of objectives met, and how early a request that misses its objective is shed.

A request that misses its objective, is shed or never ends is a miss. Earliest deadline first is printed, never a win:
without shedding it serves requests whose deadline has just become infeasible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headway.bench.policy import reference
from headway.bench.policy.claim import Claim
from headway.bench.policy.workloads import mean
from headway.bench.virtual import BenchRun, JobRecord, simulate
from headway.core.policy import Policy
from headway.core.request import Request
from headway.policies.edf import EarliestDeadlineFirst
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.priority import Priority
from headway.policies.slo import SloAware

SEEDS, SECONDS = 5, 600.0
TARGET = 0.19  # seconds of ITL; both classes ask for 0.2 on average


class RecordingSlo(SloAware):
    """Records how long each request could wait."""

    def __init__(self) -> None:
        super().__init__()
        self.slack_of: dict[int, float] = {}

    def latest_start(self, req: Request) -> float:
        latest = super().latest_start(req)
        self.slack_of[req.id] = latest - req.arrival
        return latest


def overload(seed: int) -> Iterator[Claim]:
    """At one and a half times what can be served, and at 1.2 times."""
    seeds = range(seed, seed + SEEDS)
    share = {}
    others = {"fcfs": FirstComeFirstServed, "edf, without shedding": EarliestDeadlineFirst, "priority": Priority}
    for name, policy in others.items():
        share[name] = mean([met(_serve(policy, 1.5, each).records) for each in seeds])
        yield Claim("overload", f"1.5x, {name}: objectives met", share[name])
    recorded = [(slo := RecordingSlo(), _serve(always(slo), 1.5, each)) for each in seeds]
    share["slo"] = mean([met(run.records) for _, run in recorded])
    yield Claim("overload", "1.5x, slo: objectives met", share["slo"])
    yield Claim("overload", "1.5x, slo over fcfs", share["slo"] / share["fcfs"], least=3.0)
    yield Claim("overload", "1.5x, edf over fcfs: not a win", share["edf, without shedding"] / share["fcfs"], most=1.2)
    yield from shed_claims("overload", recorded)
    yield from _classes([_serve(SloAware, 1.2, each) for each in seeds])


def shed_claims(case: str, recorded: Sequence[tuple[RecordingSlo, BenchRun]]) -> Iterator[Claim]:
    """A shed request was never admitted, and was shed in the step in which its objective became infeasible."""
    num_shed, used, late = 0, 0.0, 0.0
    for policy, run in recorded:
        longest = max(step.seconds for step in run.steps)
        for id, record in enumerate(run.records):
            if record.finish == "shed":
                assert record.output is not None
                assert record.output.timing is not None
                timing = record.output.timing
                num_shed += 1
                used += timing.prefill_s + timing.decode_s + record.num_tokens
                late = max(late, (timing.total_s - max(0.0, policy.slack_of[id])) / longest)
    yield Claim(case, "1.5x, slo: shed", float(num_shed), least=1.0)
    yield Claim(case, "shed requests: seconds in a slot and tokens, all together", used, most=0.0)
    yield Claim(case, "shed requests: steps from infeasible to shed, at most", late, most=1.0)


def _classes(runs: Sequence[BenchRun]) -> Iterator[Claim]:
    interactive = [[record for record in run.records if record.job.lane == "interactive"] for run in runs]
    batch = [[record for record in run.records if record.job.lane == "batch"] for run in runs]
    worst = min(met(records) for records in interactive)
    lost = sum(not record.is_met for records in interactive for record in records)
    lost_batch = sum(not record.is_met for records in batch for record in records)
    yield Claim("overload", "1.2x, slo: interactive met, worst seed", worst, least=0.95)
    yield Claim("overload", "1.2x, slo: batch met", mean([met(records) for records in batch]))
    yield Claim("overload", "1.2x, slo: batch's part of what is lost", lost_batch / (lost + lost_batch), least=0.8)


def _serve(policy: Callable[[], Policy], load: float, seed: int) -> BenchRun:
    jobs = reference.two_classes(random.Random(seed), load, SECONDS)
    return simulate(jobs, replace(reference.engine(policy), target=TARGET))


def always(policy: Policy) -> Callable[[], Policy]:
    return lambda: policy


def met(records: Sequence[JobRecord]) -> float:
    return sum(record.is_met for record in records) / len(records)
