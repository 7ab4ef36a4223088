"""TTFT predicted at arrival: a server that knows it can refuse early and report when to retry.

The error is relative, after two minutes; predicted lengths have the same error as in the other cases. Where the order
lets later requests overtake and the engine is overloaded, no prediction can be exact: that is printed without a bar.

A request arrives while a step runs and reaches the engine when that step ends, half a step later on average: at 0.95x
that is 55 to 70 ms, with a median TTFT of 370 to 570 ms. The engine predicts from then on, by its own clock. By the
client's clock the prediction is exact only together with the time already waited, which is known by then; without it
the error grows by half a step, and that is printed too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from headway.bench.policy import reference, workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.starvation import SIGMA
from headway.bench.virtual import simulate
from headway.core.policy import Policy
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.sjf import ShortestJobFirst

SECONDS, WARM_UP = 600.0, 120.0


def ttft(seed: int) -> Iterator[Claim]:
    """Median absolute error by load and policy; with costs that are learned too."""
    cases: tuple[tuple[str, Callable[[], Policy], float, bool, float | None], ...] = (
        ("fcfs", FirstComeFirstServed, 0.5, False, 0.25),
        ("fcfs", FirstComeFirstServed, 0.8, False, 0.25),
        ("fcfs, costs learned", FirstComeFirstServed, 0.8, True, 0.25),
        ("fcfs", FirstComeFirstServed, 0.95, False, 0.25),
        ("fcfs", FirstComeFirstServed, 1.1, False, 0.25),
        ("sjf", ShortestJobFirst, 0.95, False, 0.25),
        ("sjf", ShortestJobFirst, 1.1, False, None),
    )
    for name, policy, load, learns, most in cases:
        errors = _errors(seed, policy, load, learns)
        yield Claim("ttft", f"{load}x, {name}: median error by the engine's clock", errors.engine, most=most)
        yield Claim("ttft", f"{load}x, {name}: by the client's, with the step it waited out", errors.client, most=most)
        yield Claim("ttft", f"{load}x, {name}: by the client's, without", errors.blind)


class _Errors(NamedTuple):
    engine: float
    client: float
    blind: float


def _errors(seed: int, policy: Callable[[], Policy], load: float, learns: bool) -> _Errors:
    jobs = reference.conversations(random.Random(seed), load, SECONDS, SIGMA)
    run = simulate(jobs, replace(reference.engine(policy), predicts=True, learns_costs=learns))
    pairs = [
        (record, record.predicted) for record in run.records if record.job.at > WARM_UP and record.predicted is not None
    ]
    return _Errors(
        _median([abs(ttft - (record.first - record.taken)) / (record.first - record.taken) for record, ttft in pairs]),
        _median([abs(record.taken + ttft - record.first) / record.ttft for record, ttft in pairs]),
        _median([abs(ttft - record.ttft) / record.ttft for record, ttft in pairs]),
    )


def _median(errors: list[float]) -> float:
    return workloads.quantile(errors, 0.5)
