"""Below about 0.8 of the capacity no request waits under any policy, so no policy may be slower than fcfs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headway.bench.policy import reference, workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.starvation import GUARDED, SIGMA
from headway.bench.scheduler import build
from headway.bench.virtual import Job, simulate
from headway.core.policy import Policy
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.priority import Priority
from headway.policies.slo import SloAware

SECONDS = 600.0
POLICIES: dict[str, Callable[[], Policy]] = {
    **GUARDED,
    "priority": Priority,
    "slo": SloAware,
    "sjf in lanes of tenants": lambda: build("lanes"),
}


class _Times(NamedTuple):
    mean: float
    p99: float


def harm(seed: int) -> Iterator[Claim]:
    """At half load and at 0.8 of the capacity."""
    for load in (0.5, 0.8):
        jobs = reference.conversations(random.Random(seed), load, SECONDS, SIGMA)
        fcfs = _times(jobs, FirstComeFirstServed)
        for name, policy in POLICIES.items():
            times = _times(jobs, policy)
            yield Claim("harm", f"{load}x, {name}: mean end to end over fcfs", times.mean / fcfs.mean, most=1.02)
            yield Claim("harm", f"{load}x, {name}: P99 over fcfs", times.p99 / fcfs.p99, most=1.02)


def _times(jobs: list[Job], policy: Callable[[], Policy]) -> _Times:
    totals = [record.total for record in simulate(jobs, reference.engine(policy)).records]
    return _Times(workloads.mean(totals), workloads.quantile(totals, 0.99))
