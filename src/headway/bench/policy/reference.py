"""The engine of the cases: one A100 with a model of 13 billion parameters, KV for 66,000 tokens, 64 slots.

`capacity` is what it can serve of conversations, measured once per process by letting it clear a burst.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from headway.bench.policy import workloads
from headway.bench.virtual import EngineSetup, Job
from headway.core.policy import Policy
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Limits

Arrivals = Callable[[random.Random, float, float], list[float]]  # by rate and seconds

SLOTS, TOKENS = 64, 1024
BURST = 600


def engine(policy: Callable[[], Policy]) -> EngineSetup:
    return EngineSetup(policy, Limits(SLOTS, TOKENS))


@cache
def capacity() -> float:
    """Conversations per second, first come, first served."""
    rng = random.Random(1)
    return workloads.capacity(
        [Job(0.0, *workloads.conversation(rng)) for _ in range(BURST)], engine(FirstComeFirstServed)
    )


def conversations(
    rng: random.Random, load: float, seconds: float, sigma: float | None = None, arrivals: Arrivals = workloads.poisson
) -> list[Job]:
    """At `load` times the capacity. With `sigma` the scheduler gets each length with so much error."""
    jobs = []
    for at in arrivals(rng, load * capacity(), seconds):
        num_prompt, num_output = workloads.conversation(rng)
        expected = 0.0 if sigma is None else max(1.0, workloads.noisy(rng, num_output, sigma))
        jobs.append(Job(at, num_prompt, num_output, max_tokens=1000, expected=expected))
    return jobs


def two_classes(
    rng: random.Random,
    load: float,
    seconds: float,
    arrivals: Arrivals = workloads.poisson,
    sigma: float | None = None,
) -> list[Job]:
    """Half of them want their first token within two seconds, half within thirty."""
    return [_classed(job, rng.random() < 0.5) for job in conversations(rng, load, seconds, sigma, arrivals)]


def _classed(job: Job, is_interactive: bool) -> Job:
    if is_interactive:
        return replace(job, slo=workloads.INTERACTIVE, lane="interactive", priority=0)
    return replace(job, slo=workloads.BATCH, lane="batch", priority=1)
