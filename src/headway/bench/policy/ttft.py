"""The time to the first token, foretold when a request comes: a server that knows it can refuse early, and say when.

The error is relative, by the engine's own clock, after two minutes; the lengths that are foretold are as bad as
elsewhere. Where the order lets later ones overtake and there is too much to do, nobody can know: that is printed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from headway.bench.policy import laws, reference
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
        error = _error(seed, policy, load, learns)
        yield Claim("ttft", f"{load}x, {name}: median error of the time foretold", error, most=most)


def _error(seed: int, policy: Callable[[], Policy], load: float, learns: bool) -> float:
    jobs = reference.conversations(random.Random(seed), load, SECONDS, SIGMA)
    run = simulate(jobs, replace(reference.engine(policy), predicts=True, learns_costs=learns))
    errors = []
    for trip in run.trips:
        if trip.job.at > WARM_UP and trip.predicted is not None and trip.output and trip.output.timing:
            real = trip.output.timing.first_token_s
            errors.append(abs(trip.predicted - real) / real)
    return laws.quantile(errors, 0.5)
