"""The production scheduler, ledger and loop under a clock that only the cost model moves.

Jobs arrive by that clock; each ends by a stop token after as many tokens as the job says, which the scheduler cannot
know. Equal jobs and equal setups give equal trips, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headway.control.costs import CostModel, Weights
from headway.control.pacer import TargetPacer
from headway.core.ledger import KVLedger
from headway.core.policy import Gate, Policy
from headway.core.scheduler import Scheduler
from headway.engine.books import Books
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity
from headway.engine.virtual import VirtualExecutor
from headway.values.limits import Limits
from headway.values.params import NO_SLO, SamplingParams, Slo

BLOCK = 16
UNIT = Weights(base=1.0)
"""Every step takes a second, whatever it carries."""
# One A100 with OPT-13B as published in step-time studies: 23.5 ms for a decode step, 0.14 ms per prompt token.
A100 = Weights(base=22.0e-3, tokens=0.1405e-3, pairs=8.08e-9, decode=0.0607e-3, context=0.593e-6)


@dataclass(frozen=True, slots=True)
class Job:
    """One request as it will turn out."""

    at: float
    num_prompt: int
    num_output: int
    max_tokens: int | None = None  # what it asks for; as much as it gets if not given
    tenant: str = ""
    lane: str = ""
    priority: int = 0
    slo: Slo = NO_SLO
    expected: float = 0.0  # what the scheduler is told about num_output


@dataclass(slots=True)
class Trip:
    """What became of a job, by the virtual clock."""

    job: Job
    first: float = math.nan
    last: float = math.nan
    end: float = math.nan
    num_tokens: int = 0
    max_gap: float = 0.0
    finish: str = ""
    output: Output | None = None

    @property
    def ttft(self) -> float:
        return self.first - self.job.at

    @property
    def total(self) -> float:
        return self.end - self.job.at

    @property
    def is_answered(self) -> bool:
        return self.finish in ("stop", "length")

    @property
    def is_met(self) -> bool:
        """It got its answer, and as soon as its objective says."""
        slo, gaps = self.job.slo, max(1, self.num_tokens - 1)
        return (
            self.is_answered
            and (slo.ttft is None or self.ttft <= slo.ttft)
            and (slo.itl is None or (self.last - self.first) / gaps <= slo.itl)
            and (slo.deadline is None or self.total <= slo.deadline)
        )

    def add_token(self, now: float) -> None:
        if self.num_tokens:
            self.max_gap = max(self.max_gap, now - self.last)
        else:
            self.first = now
        self.num_tokens += 1
        self.last = now


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine that computes nothing and charges `weights` for it."""

    policy: Callable[[], Policy]
    limits: Limits
    weights: Weights = A100
    num_blocks: int = 66_144 // BLOCK
    gate: Callable[[], Gate] | None = None
    target: float | None = None  # seconds between two tokens
    learns_costs: bool = False  # the scheduler learns what steps cost, instead of knowing


@dataclass(slots=True)
class Run:
    """All trips in the order of their jobs, and what the engine counted."""

    trips: list[Trip]
    steps: list[tuple[float, bool]] = field(default_factory=list)  # seconds, whether it carried a chunk
    preemptions: int = 0
    recomputed: int = 0
    generated: int = 0
    seat_steps: int = 0  # seats in use, summed over steps

    @property
    def makespan(self) -> float:
        return max(trip.end for trip in self.trips) - min(trip.job.at for trip in self.trips)

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.makespan


class World:
    """One engine, its clock and its jobs."""

    def __init__(self, setup: Setup) -> None:
        self.clock = VirtualClock()
        fixed = CostModel(setup.weights)
        self.costs = CostModel() if setup.learns_costs else fixed
        pacer = None if setup.target is None else TargetPacer(self.costs, setup.target, BLOCK)
        self.books = Books(self.clock)
        self.scheduler = Scheduler(
            KVLedger(setup.num_blocks, BLOCK, caching=False),
            setup.limits,
            setup.policy(),
            sink=self.books,
            pacer=pacer,
            gate=setup.gate() if setup.gate else None,
            costs=self.costs,
        )
        capacity = Capacity(setup.num_blocks, BLOCK, setup.limits.rows)
        self.stops: dict[int, int] = {}
        self.executor = VirtualExecutor(capacity, self.clock, fixed, lambda: self.scheduler.last_work, self.stops)
        info = EngineInfo("none", 1 << 40, 1 << 40, BLOCK, setup.num_blocks, setup.limits.rows)
        self.engine = Engine(self.scheduler, self.executor, info, self.books, self.clock, max_waiting=1 << 40)

    def submit(self, id: int, job: Job) -> None:
        most = job.max_tokens or job.num_output
        if job.num_output < most:
            self.stops[id] = job.num_output
        self.engine.add(
            Submit(
                id=id,
                tokens=[id] * job.num_prompt,
                params=SamplingParams(max_tokens=most),
                tenant=job.tenant,
                lane=job.lane,
                priority=job.priority,
                slo=job.slo,
                expected=job.expected,
                ceiling=job.expected,
            )
        )


def simulate(jobs: Iterable[Job], setup: Setup, until: float = math.inf) -> Run:
    """Serve all jobs, or those that arrive and end before `until`."""
    world = World(setup)
    engine, clock = world.engine, world.clock
    ordered = sorted(jobs, key=lambda job: job.at)
    run = Run([Trip(job) for job in ordered])
    trips, coming = run.trips, 0
    while (coming < len(ordered) or engine.has_work) and clock.now() < until:
        while coming < len(ordered) and ordered[coming].at <= clock.now():
            world.submit(coming, ordered[coming])
            coming += 1
        before = clock.now()
        emission = engine.step()
        now = clock.now()
        for id in emission.ids:
            trips[id].add_token(now)
        _end(trips, emission.outputs, now)
        if emission.is_idle:
            clock.advance(ordered[coming].at - now if coming < len(ordered) else 1e-3)
        elif now > before:
            run.steps.append((now - before, world.executor.last_was_mixed))
            run.seat_steps += len(emission.ids)
    run.preemptions, run.recomputed = world.books.preemptions, world.books.recomputed
    run.generated = world.books.generated
    return run


def _end(trips: Sequence[Trip], outputs: Sequence[Output], now: float) -> None:
    for output in outputs:
        if output.finish is not None:
            trip = trips[output.id]
            trip.end, trip.finish, trip.output = now, output.finish, output
