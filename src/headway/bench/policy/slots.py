"""Slots alone: every step takes a second whatever it carries, memory is endless, prompts are one token.

Twenty requests whose results can be worked out on paper, exactly; then 2,000 of several workloads, within a tenth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from headway.bench.policy.claim import Claim
from headway.bench.virtual import UNIT, BenchRun, EngineSetup, Job, simulate
from headway.control.gates import BatchGate, NearLengths
from headway.core.policy import Gate, Key, Policy
from headway.core.request import Request
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Limits

LENGTHS = (10, 60, 47, 120, 80, 200, 350, 500, 30, 45, 25, 90, 15, 300, 60, 20, 150, 40, 75, 35)
SLOTS = 8


class ByLength(Policy):
    """Shortest answer first, as if lengths were known."""

    def key(self, req: Request) -> Key:
        return (req.expected,)


class ByLengthDown(Policy):
    """Longest answer first."""

    def key(self, req: Request) -> Key:
        return (-req.expected,)


def serve(
    lengths: Sequence[int], slots: int, policy: Callable[[], Policy] = FirstComeFirstServed, batches: bool = False
) -> BenchRun:
    """All of them at once; with `batches`, a finished request waits for the others of its batch."""
    most = max(lengths)
    jobs = [Job(0.0, 1, length, max_tokens=most + 1, expected=float(length)) for length in lengths]
    gate: Callable[[], Gate] | None = (lambda: BatchGate(slots)) if batches else None
    blocks = len(lengths) * (most // 16 + 2)
    return simulate(jobs, EngineSetup(policy, Limits(slots, 2 * slots), UNIT, blocks, gate))


FIXTURES: tuple[tuple[str, Callable[[], Policy], bool, float, float, float], ...] = (
    ("static", FirstComeFirstServed, True, 950.0, 710.0, 0.296),
    ("static, by length", ByLength, True, 695.0, 235.0, 0.405),
    ("dynamic, by buckets", NearLengths, True, 695.0, 235.0, 0.405),
    ("continuous, fcfs", FirstComeFirstServed, False, 500.0, 162.75, 0.563),
    ("continuous, shortest first", ByLength, False, 600.0, 139.2, 0.469),
    ("continuous, longest first", ByLengthDown, False, 500.0, 208.95, 0.563),
)


def fixtures(seed: int) -> Iterator[Claim]:
    """Exact by construction: makespan, mean completion, use of the slots."""
    for name, policy, batches, makespan, mean, use in FIXTURES:
        run = serve(LENGTHS, SLOTS, policy, batches)
        ends = [record.total for record in run.records]
        yield Claim("fixture", f"{name}: makespan", run.makespan, makespan, makespan)
        yield Claim("fixture", f"{name}: mean completion", sum(ends) / len(ends), mean, mean)
        yield Claim("fixture", f"{name}: use of slots", round(sum(LENGTHS) / SLOTS / run.makespan, 3), use, use)


def _workloads(count: int) -> dict[str, list[int]]:
    rng = random.Random(1)
    return {
        "uniform": [100] * count,
        "1 to 128": [rng.randint(1, 128) for _ in range(count)],
        "exponential": [min(1536, max(1, round(rng.expovariate(1 / 128)))) for _ in range(count)],
        "lognormal": [max(1, round(rng.lognormvariate(math.log(128), 1.2))) for _ in range(count)],
        "bimodal": [2000 if rng.random() < 0.1 else 50 for _ in range(count)],
    }


RATIOS: dict[str, tuple[float, float]] = {
    "uniform": (1.00, 1.00),
    "1 to 128": (1.76, 1.92),
    "exponential": (2.69, 3.92),
    "lognormal": (3.35, 5.41),
    "bimodal": (4.82, 7.37),
}


def ratios(seed: int) -> Iterator[Claim]:
    """How much faster continuous batching is than static, by slots alone."""
    for name, lengths in _workloads(2000).items():
        for slots, wanted in zip((8, 32), RATIOS[name], strict=True):
            ratio = serve(lengths, slots, batches=True).makespan / serve(lengths, slots).makespan
            yield Claim("slots", f"{name}, {slots} slots: continuous over static", ratio, 0.9 * wanted, 1.1 * wanted)
