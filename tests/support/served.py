"""Small loads on the production scheduler under the virtual clock, for tests of what a policy guarantees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.bench.virtual import A100, BenchRun, EngineSetup, Job, simulate
from headway.control.costs import CostWeights
from headway.core.policy import Policy
from headway.values.limits import Limits


def serve(
    jobs: Sequence[Job],
    policy: Callable[[], Policy],
    slots: int = 1,
    num_blocks: int = 4096,
    weights: CostWeights = A100,
    **rules: object,
) -> BenchRun:
    limits = Limits(slots, 4096, **rules)  # type: ignore[arg-type]
    return simulate(jobs, EngineSetup(policy, limits, weights, num_blocks))


def order(jobs: Sequence[Job], policy: Callable[[], Policy], **how: object) -> list[int]:
    """The jobs, by their place in the list, in the order of their first tokens. They must be given by arrival."""
    records = serve(jobs, policy, **how).records  # type: ignore[arg-type]
    assert [record.job for record in records] == list(jobs)
    return sorted(range(len(jobs)), key=lambda i: records[i].first)
