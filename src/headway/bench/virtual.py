"""The production scheduler, ledger, SLO admission and loop under a clock that only the cost model moves.

Jobs arrive by that clock; each ends by a stop token after as many tokens as the job says, which the scheduler cannot
know. Equal jobs and equal setups give equal records, bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headway.control.costs import CostModel, CostWeights
from headway.control.pacer import TargetPacer
from headway.control.slo_admission import SloAdmission
from headway.core.ledger import KVLedger
from headway.core.policy import Gate, Policy
from headway.core.scheduler import Scheduler
from headway.engine.block_log import BlockLog
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity
from headway.engine.metrics import EngineMetrics
from headway.engine.mover import BlockMover
from headway.engine.published import LaneBacklog
from headway.engine.virtual import VirtualExecutor
from headway.errors import Unreachable
from headway.values.events import Event, EventSink
from headway.values.limits import Limits
from headway.values.params import NO_SLO, SamplingParams, Slo

BLOCK = 16
FAMILY = 1 << 30  # token ids from here on are those of families; ids below are job numbers
TICK = 1e-3  # seconds between two polls of a closed gate
UNIT = CostWeights(base=1.0)
"""Every step takes a second, whatever it carries."""
# One A100 with OPT-13B as published in step-time studies: 23.5 ms for a decode step, 0.14 ms per prompt token.
A100 = CostWeights(base=22.0e-3, tokens=0.1405e-3, pairs=8.08e-9, decode=0.0607e-3, context=0.593e-6)


@dataclass(frozen=True, slots=True)
class Job:
    """One request, with the length that its answer will have."""

    at: float
    num_prompt: int
    num_output: int
    max_tokens: int | None = None  # None: `num_output`
    tenant: str = ""
    lane: str = ""
    priority: int = 0
    slo: Slo = NO_SLO
    expected: float = 0.0  # the prediction of num_output that the scheduler gets
    family: int = 0  # all prompts of a family begin with the same `num_shared` tokens
    num_shared: int = 0
    group: int = 0  # jobs of one client's request have the same

    def submit(self, id: int, tokens: list[int], params: SamplingParams) -> Submit:
        """The request as the engine sees it: its intent, and its predicted length."""
        return Submit(
            id,
            tokens,
            params,
            tenant=self.tenant,
            lane=self.lane,
            priority=self.priority,
            slo=self.slo,
            expected=self.expected,
            ceiling=self.expected,
            group=self.group,
        )


@dataclass(slots=True)
class JobRecord:
    """What became of a job, by the virtual clock."""

    job: Job
    first: float = math.nan
    last: float = math.nan
    end: float = math.nan
    num_tokens: int = 0
    max_itl: float = 0.0
    finish: str = ""
    output: Output | None = None
    taken: float = math.nan  # by the engine: at the end of the step that ran at its arrival
    predicted: float | None = None  # seconds from `taken` to the first token, as predicted

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
        """It is answered within its objective."""
        slo, num_itls = self.job.slo, max(1, self.num_tokens - 1)
        return (
            self.is_answered
            and (slo.ttft is None or self.ttft <= slo.ttft)
            and (slo.itl is None or (self.last - self.first) / num_itls <= slo.itl)
            and (slo.deadline is None or self.total <= slo.deadline)
        )

    def add_tokens(self, count: int, first: float, last: float, max_itl: float) -> None:
        """Record `count` tokens, the first and last at these times, with no ITL between them above `max_itl`."""
        if self.num_tokens:
            self.max_itl = max(self.max_itl, first - self.last, max_itl)
        else:
            self.first, self.max_itl = first, max_itl
        self.num_tokens += count
        self.last = last


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine that computes nothing; `weights` give the virtual time of each step."""

    policy: Callable[[], Policy]
    limits: Limits
    weights: CostWeights = A100
    num_blocks: int = 66_144 // BLOCK
    gate: Callable[[], Gate] | None = None
    target: float | None = None  # ITL in seconds
    learns_costs: bool = False  # the scheduler learns what steps cost, instead of knowing
    predicts: bool = False  # predict the TTFT of each job at its arrival
    caches: bool = False  # prefix caching
    block_size: int = BLOCK
    max_waiting: int = 1 << 40


class TimedStep(NamedTuple):
    """When it ended, how long it took, whether it carried a chunk."""

    end: float
    seconds: float
    is_mixed: bool


@dataclass(slots=True)
class BenchRun:
    """All records in the order of their jobs, and the counters of the engine."""

    records: list[JobRecord]
    steps: list[TimedStep] = field(default_factory=list)
    preemptions: int = 0
    recomputed: int = 0
    generated: int = 0
    slot_steps: int = 0  # slots in use, summed over steps
    itls: Counter[int] = field(default_factory=Counter)  # in tenths of a millisecond

    @property
    def makespan(self) -> float:
        return max(record.end for record in self.records) - min(record.job.at for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.makespan

    @property
    def most_preemptions(self) -> int:
        """Of one request."""
        return max(record.output.preemptions for record in self.records if record.output)

    def itl(self, q: float) -> float:
        """Seconds: a quantile of the ITL over all tokens of all requests."""
        left = int(q * self.itls.total())
        for tenths in sorted(self.itls):
            left -= self.itls[tenths]
            if left < 0:
                return tenths * 1e-4
        return math.nan


class _Both:
    def __init__(self, one: EventSink, other: EventSink) -> None:
        self._one, self._other = one, other

    def emit(self, event: Event) -> None:
        self._one.emit(event)
        self._other.emit(event)


class Ticker(Protocol):
    """A clock that can be waited for."""

    def now(self) -> float: ...

    def advance(self, seconds: float) -> None: ...


class JobEngine(Protocol):
    """An engine that jobs can be sent to."""

    @property
    def engine(self) -> Engine: ...

    @property
    def clock(self) -> Ticker: ...

    @property
    def last_was_mixed(self) -> bool:
        """The step collected last carried a chunk."""

    def submit(self, id: int, job: Job) -> float | None:
        """Its predicted time to the first token, where that is asked for; Unreachable if the engine rejects it."""


Moves = Callable[[Scheduler, VirtualExecutor, VirtualClock], BlockMover]
"""Makes what moves KV in and out of an engine."""


class World:
    """One engine, its clock and its jobs."""

    def __init__(
        self, setup: EngineSetup, sink: EventSink | None = None, *, moves: Moves | None = None, fetch_at: str = ""
    ) -> None:
        self.clock = VirtualClock()
        self._predicts = setup.predicts
        fixed = CostModel(setup.weights)
        self.costs = CostModel() if setup.learns_costs else fixed
        pacer = TargetPacer(self.costs, setup.target, setup.block_size)
        blocks = BlockLog()
        self.metrics = EngineMetrics(self.clock)
        self.scheduler = Scheduler(
            KVLedger(setup.num_blocks, setup.block_size, caching=setup.caches, told=blocks),
            setup.limits,
            setup.policy(),
            sink=self.metrics if sink is None else _Both(self.metrics, sink),
            pacer=pacer,
            gate=setup.gate() if setup.gate else None,
            costs=self.costs,
            observer=LaneBacklog(),
        )
        capacity = Capacity(setup.num_blocks, setup.block_size, setup.limits.rows)
        self.stops: dict[int, int] = {}
        self.executor = VirtualExecutor(capacity, self.clock, fixed, self.stops)
        info = EngineInfo(
            "none", 1 << 40, 1 << 40, setup.block_size, setup.num_blocks, setup.limits.rows, fetch_at=fetch_at
        )
        mover = None if moves is None else moves(self.scheduler, self.executor, self.clock)
        blocks.also = None if mover is None else mover.told
        self.engine = Engine(
            self.scheduler,
            self.executor,
            info,
            self.metrics,
            self.clock,
            max_waiting=setup.max_waiting,
            slo_admission=SloAdmission(self.scheduler.state.policy, self.costs),
            blocks=blocks,
            mover=mover,
        )

    @property
    def last_was_mixed(self) -> bool:
        return self.executor.last_was_mixed

    def submit(self, id: int, job: Job) -> float | None:
        most = job.max_tokens or job.num_output
        if job.num_output < most:
            self.stops[id] = job.num_output
        tokens = [FAMILY + job.family] * job.num_shared + [id] * (job.num_prompt - job.num_shared)
        submit = job.submit(id, tokens, SamplingParams(max_tokens=most))
        predicted = self.engine.predict_ttft(submit) if self._predicts else None
        self.engine.add(submit)
        return predicted


class SteadySteps:
    """A stretch of steps in which the same requests get one token each, recorded once when it ends."""

    def __init__(self, run: BenchRun) -> None:
        self._records, self._itls = run.records, run.itls
        self._ids: Sequence[int] = ()
        self._count = 0
        self._first = self._last = self._max_itl = 0.0

    def add(self, ids: Sequence[int], now: float) -> None:
        if ids is self._ids and self._count:  # the scheduler returns the same list while no request joins or leaves
            self._count += 1
            self._max_itl = max(self._max_itl, now - self._last)
            self._itls[round((now - self._last) * 1e4)] += len(ids)
        else:
            self.flush()
            self._ids, self._count, self._first, self._max_itl = ids, 1, now, 0.0
        self._last = now

    def flush(self) -> None:
        if self._count:
            for id in self._ids:
                if self._records[id].num_tokens:
                    self._itls[round((self._first - self._records[id].last) * 1e4)] += 1
                self._records[id].add_tokens(self._count, self._first, self._last, self._max_itl)
        self._count = 0


def simulate(
    jobs: Iterable[Job], setup: EngineSetup, until: float = math.inf, sink: EventSink | None = None
) -> BenchRun:
    """Serve all jobs, or as much of them as is done by `until`; `sink` gets the events."""
    return drive(World(setup, sink), jobs, until)


def drive(world: JobEngine, jobs: Iterable[Job], until: float = math.inf) -> BenchRun:
    """Submit each job at its time and step the engine until all are done, by the engine's clock."""
    engine, clock = world.engine, world.clock
    ordered = sorted(jobs, key=lambda job: job.at)
    run = BenchRun([JobRecord(job) for job in ordered])
    before_all = engine.metrics.generated
    records, coming, stretch = run.records, 0, SteadySteps(run)
    while (coming < len(ordered) or engine.has_work) and clock.now() < until:
        while coming < len(ordered) and ordered[coming].at <= clock.now():
            record = records[coming]
            record.taken = clock.now()
            try:
                record.predicted = world.submit(coming, record.job)
            except Unreachable:
                record.finish, record.end = "rejected", record.taken
            coming += 1
        before = clock.now()
        emission = engine.step()
        now = clock.now()
        stretch.add(emission.ids, now)
        if emission.finished:
            stretch.flush()
            _end(records, emission.finished, now)
        if emission.idle_s is not None:
            pause = ordered[coming].at - now if coming < len(ordered) else TICK
            clock.advance(min(pause, TICK) if engine.has_work else pause)  # a gate may open before the next arrival
        elif now > before:
            run.steps.append(TimedStep(now, now - before, world.last_was_mixed))
            run.slot_steps += len(emission.ids)
    stretch.flush()
    run.preemptions, run.recomputed = engine.metrics.preemptions, engine.metrics.recomputed
    run.generated = engine.metrics.generated - before_all
    return run


def _end(records: Sequence[JobRecord], outputs: Sequence[Output], now: float) -> None:
    for output in outputs:
        record = records[output.id]
        record.end, record.finish, record.output = now, output.finish or "", output
