"""Small loads on the production scheduler under the virtual clock, for tests of what a policy promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.bench.virtual import A100, Job, Run, Setup, simulate
from headway.control.costs import Weights
from headway.core.policy import Policy
from headway.values.limits import Limits


def serve(
    jobs: Sequence[Job],
    policy: Callable[[], Policy],
    seats: int = 1,
    num_blocks: int = 4096,
    weights: Weights = A100,
    **rules: object,
) -> Run:
    limits = Limits(seats, 4096, **rules)  # type: ignore[arg-type]
    return simulate(jobs, Setup(policy, limits, weights, num_blocks))


def order(jobs: Sequence[Job], policy: Callable[[], Policy], **how: object) -> list[int]:
    """The jobs, by their place in the list, in the order of their first tokens. They must be given by arrival."""
    trips = serve(jobs, policy, **how).trips  # type: ignore[arg-type]
    assert [trip.job for trip in trips] == list(jobs)
    return sorted(range(len(jobs)), key=lambda i: trips[i].first)
