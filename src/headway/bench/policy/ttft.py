"""The time to the first token, foretold when a request comes: a server that knows it can refuse early, and say when.

The error is relative, after two minutes; the lengths that are foretold are as bad as elsewhere. Where the order lets
later ones overtake and there is too much to do, nobody can know: that is printed.

A request comes while a step runs and is taken in when it ends, half a step later on the mean: at 0.95x that is 55 to 70
ms, and the median time to the first token 370 to 570. The engine says what is to come from then on, and by its own
clock that is right. By the client's, it is right together with the time already waited, which is known when it is said;
whoever leaves that out is wrong by half a step more, and that is printed too.
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
    told = [
        (record, record.predicted) for record in run.records if record.job.at > WARM_UP and record.predicted is not None
    ]
    return _Errors(
        _median([abs(said - (record.first - record.taken)) / (record.first - record.taken) for record, said in told]),
        _median([abs(record.taken + said - record.first) / record.ttft for record, said in told]),
        _median([abs(said - record.ttft) / record.ttft for record, said in told]),
    )


def _median(errors: list[float]) -> float:
    return workloads.quantile(errors, 0.5)
