"""Memory that runs out: victims, pinning, reservations, peaks; and static batches."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from headway.bench.virtual import UNIT, BenchRun, EngineSetup, Job, simulate
from headway.control.gates import BatchGate
from headway.core.policy import Policy
from headway.values.limits import Admission, Limits, Victims

LIMITS = Limits(16, 512)


def _jobs(seed: int = 1, count: int = 60) -> list[Job]:
    rng = random.Random(seed)
    lengths = [rng.choice([10, 40, 150]) for _ in range(count)]
    return [Job(0.0, rng.randint(10, 60), n, max_tokens=200, expected=float(n)) for n in lengths]


def _serve(limits: Limits, num_blocks: int = 40) -> BenchRun:
    run = simulate(_jobs(), EngineSetup(Policy, limits, num_blocks=num_blocks))
    assert [record.num_tokens for record in run.records] == [record.job.num_output for record in run.records]
    return run


def _most(run: BenchRun) -> int:
    return max(record.output.preemptions for record in run.records if record.output)


def test_no_request_is_preempted_more_often_than_the_limit_says() -> None:
    free = _most(_serve(replace(LIMITS, preemptions=1000)))
    assert free > 3
    assert _serve(replace(LIMITS, preemptions=0)).preemptions == 0
    for most in (1, 3):
        run = _serve(replace(LIMITS, preemptions=most))
        often = [record.output.preemptions for record in run.records if record.output]
        assert most <= max(often) <= most + 1
        assert sum(count > most for count in often) <= 0.05 * len(often), "estimates of lengths fail now and then"


def test_reserved_memory_is_never_taken() -> None:
    assert _serve(LIMITS).preemptions > 0
    run = _serve(replace(LIMITS, admission=Admission.RESERVE))
    assert run.preemptions == 0


def test_peak_admits_as_many_as_fit_when_lengths_are_known() -> None:
    optimistic, peak = _serve(LIMITS), _serve(replace(LIMITS, admission=Admission.PEAK))
    reserve = _serve(replace(LIMITS, admission=Admission.RESERVE))
    assert peak.preemptions < 0.2 * optimistic.preemptions
    assert peak.makespan < reserve.makespan


def test_least_recompute_loses_less_at_a_time_than_last_come() -> None:
    least, last = _serve(LIMITS), _serve(replace(LIMITS, victims=Victims.LAST_COME))
    assert 0 < least.recomputed / least.preemptions < last.recomputed / last.preemptions


def test_a_static_batch_ends_together_and_the_next_begins_then() -> None:
    jobs = [Job(0.0, 1, n) for n in (5, 20, 10, 7)]
    records = simulate(jobs, EngineSetup(Policy, Limits(2, 64), UNIT, 4096, lambda: BatchGate(2))).records
    assert [record.end for record in records] == [20.0, 20.0, 30.0, 30.0]


def test_a_dynamic_batch_waits_for_more_requests_as_long_as_its_window() -> None:
    jobs = [Job(0.0, 1, 5), Job(2.0, 1, 5)]
    for window, begins in ((0.5, 0.5), (4.0, 2.0)):
        setup = EngineSetup(Policy, Limits(2, 64), UNIT, 4096, partial(BatchGate, 2, window))
        first = simulate(jobs, setup).records[0].first
        assert begins + 1.0 <= first < begins + 1.01
