"""One request in a hundred asks for a token every millisecond, which is infeasible: the others must not lose by it.

The engine runs at 0.9 of its capacity. Guarding an ITL means short steps and few rows, which costs throughput at this
load, so only a feasible ITL is guarded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from headway.bench.policy import reference, workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import simulate
from headway.policies.slo import SloAware
from headway.values.params import Slo

LOAD, SECONDS, SEEDS = 0.9, 600.0, 3
SHARE, ITL = 0.01, 1e-3  # seconds between two tokens; the step of one row takes 24 ms


def impossible(seed: int) -> Iterator[Claim]:
    """What requests with an infeasible objective cost those without one."""
    seeds = range(seed, seed + SEEDS)
    plain = workloads.mean([mean_ttft_of_others(each, None) for each in seeds])
    beside = workloads.mean([mean_ttft_of_others(each, ITL) for each in seeds])
    yield Claim("impossible", "0.9x, slo, no request asks for an itl: mean ttft in s", plain)
    what = "0.9x, slo, 1 % ask for an itl of 1 ms: mean ttft of the others, of that"
    yield Claim("impossible", what, beside / plain, most=1.1)


def mean_ttft_of_others(seed: int, itl: float | None, seconds: float = SECONDS) -> float:
    """Seconds, of the requests that have no objective, where one in a hundred asks for `itl`."""
    rng = random.Random(seed)
    jobs = reference.conversations(rng, LOAD, seconds)
    jobs = [replace(job, slo=Slo(itl=itl), lane="greedy") if rng.random() < SHARE else job for job in jobs]
    records = simulate(jobs, reference.engine(SloAware)).records
    assert all(record.is_answered for record in records)
    return workloads.mean([record.ttft for record in records if record.job.lane != "greedy"])
