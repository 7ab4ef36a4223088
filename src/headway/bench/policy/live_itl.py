"""Long prompts among short ones on a real engine: how long those who are being answered wait for their next token.

Ten short requests to one whose prompt has a thousand tokens. Without chunks a long prompt is one step; with a target
the engine learns what steps cost and cuts chunks to fit. Then the load rises to nine tenths of what it can serve.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway.backends.cpu import load_model
from headway.bench.live import Live, random_prompt
from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.policy.rounds import Rounds, median, ratio
from headway.bench.setup import ModelSetup
from headway.bench.virtual import BenchRun, Job, JobRecord
from headway.config import EngineConfig

SHORT, LONG, ANSWER = 48, 1000, 48
TARGET = 0.04
CHUNK, SLOTS = 64, 32
SECONDS, QUIET, BUSY, SETTLED = 30.0, 15.0, 90.0, 60.0
STREAM = 15.0  # seconds of short ones among which a long one must not starve
WINDOW = 5.0
BURSTS = 3


@dataclass(frozen=True, slots=True)
class ItlFigures:
    """Of one run, seconds."""

    largest: float  # P99 of the short ones' largest gaps
    short: float  # mean time to the first token
    long: float
    tokens_per_busy_s: float

    @staticmethod
    def of(run: BenchRun) -> ItlFigures:
        short = [record for record in run.records if record.job.num_prompt == SHORT]
        long = [record for record in run.records if record.job.num_prompt == LONG]
        busy = sum(step.seconds for step in run.steps)
        return ItlFigures(_largest(short), _ttft(short), _ttft(long), run.generated / busy)


@dataclass(frozen=True, slots=True)
class Risen:
    """Of one run in which the load rises."""

    mixed: float  # P95 of steps with a chunk, once settled, over the target
    settled: float  # seconds after the rise from which on no window is above the bar
    spread: float  # P99 over P50 of all gaps
    largest: float  # P99 of each request's largest gap, over the target


@dataclass(frozen=True, slots=True)
class Starts:
    """The time to a long prompt's first token among an endless stream of short ones."""

    long: float


class Bench:
    """The model and the mix, with what the engine can serve of it."""

    def __init__(self, setup: ModelSetup, seed: int) -> None:
        self.setup = setup
        self.seed = seed
        loaded = load_model(setup.config())
        self.live = Live(loaded, random_prompt(seed, loaded.spec.vocab_size))
        self.capacity = self._clears([replace(job, at=0.0) for job in self.mix(4.0, 10.0)])
        self.capacity_short = self._clears([Job(0.0, SHORT, ANSWER)] * 40)

    def _clears(self, burst: Sequence[Job]) -> float:
        """Of such requests, per second; the best of three, for a neighbour can only take away."""
        return max(len(burst) / self.live.serve(burst, self.paced()).makespan for _ in range(BURSTS))

    def mix(self, rate: float, seconds: float, start: float = 0.0) -> list[Job]:
        rng = random.Random(f"{self.seed}:{start}")
        times = [start + at for at in workloads.poisson(rng, rate, seconds)]
        return [Job(at, LONG if number % 11 == 5 else SHORT, ANSWER) for number, at in enumerate(times)]

    def config(self, **more: object) -> EngineConfig:
        base = {"max_num_seqs": SLOTS, "prefix_caching": False, "touch_kv": True, "num_blocks": SLOTS * 70}
        return self.setup.config(**base | more)

    def whole(self) -> EngineConfig:
        return self.config(max_num_batched_tokens=4096, max_partial_prefills=SLOTS, prefill_order="arrival")

    def chunked(self) -> EngineConfig:
        return self.config(max_num_batched_tokens=CHUNK + SLOTS, prefill_order="arrival")

    def paced(self, prefill_order: str = "shortest") -> EngineConfig:
        return self.config(max_num_batched_tokens=2048, target_itl_ms=1e3 * TARGET, prefill_order=prefill_order)


def itl(setup: ModelSetup, seed: int, rounds: int) -> Iterator[Claim]:
    """Chunks, the order of prompts, a rising load, and a long prompt that must not starve."""
    bench = Bench(setup, seed)
    yield Claim("itl", "requests per second that the engine can serve of this", bench.capacity)
    yield from _chunks(bench, rounds)
    yield from _order(bench, rounds)
    yield from _starts(bench, rounds)
    yield from _rising(bench, rounds)


def _chunks(bench: Bench, rounds: int) -> Iterator[Claim]:
    jobs, runs = bench.mix(0.7 * bench.capacity, SECONDS), Rounds[ItlFigures](("whole prompts", "chunks"))
    for name in runs.turns(rounds):
        config = bench.chunked() if name == "chunks" else bench.whole()
        runs.add(name, ItlFigures.of(bench.live.serve(jobs, config)))
    whole, chunks = runs["whole prompts"], runs["chunks"]
    lower = ratio(whole, chunks, lambda found: found.largest)
    yield Claim("itl", f"whole prompts over chunks of {CHUNK}: P99 of a short one's largest gap", lower, least=5.0)
    kept = ratio(chunks, whole, lambda found: found.tokens_per_busy_s)
    yield Claim("itl", f"chunks of {CHUNK} over whole prompts: tokens per busy second", kept, least=0.95)


def _order(bench: Bench, rounds: int) -> Iterator[Claim]:
    jobs, runs = bench.mix(0.9 * bench.capacity, SECONDS), Rounds[ItlFigures](("arrival", "shortest"))
    for name in runs.turns(rounds):
        runs.add(name, ItlFigures.of(bench.live.serve(jobs, bench.paced(name))))
    arrival, shortest = runs["arrival"], runs["shortest"]
    short = ratio(shortest, arrival, lambda found: found.short)
    yield Claim("itl", "shortest prompt first over arrival: mean ttft of the short", short, most=0.3)
    long = ratio(shortest, arrival, lambda found: found.long)
    yield Claim("itl", "shortest prompt first over arrival: mean ttft of the long", long)


def _starts(bench: Bench, rounds: int) -> Iterator[Claim]:
    rng = random.Random(bench.seed)
    stream = [Job(at, SHORT, ANSWER) for at in workloads.poisson(rng, 0.9 * bench.capacity_short, STREAM)]
    jobs, runs = [*stream, Job(STREAM / 3, LONG, ANSWER)], Rounds[Starts](("arrival", "shortest"))
    for name in runs.turns(rounds):
        records = bench.live.serve(jobs, bench.paced(name)).records
        runs.add(name, Starts(next(record.ttft for record in records if record.job.num_prompt == LONG)))
    late = ratio(runs["shortest"], runs["arrival"], lambda found: found.long)
    yield Claim("itl", "a long prompt among endless short ones, shortest first over arrival: ttft", late, most=3.0)


def _rising(bench: Bench, rounds: int) -> Iterator[Claim]:
    jobs = bench.mix(0.2 * bench.capacity, QUIET) + bench.mix(0.9 * bench.capacity, BUSY, QUIET)
    runs = Rounds[Risen](("target",))
    for name in runs.turns(rounds):
        runs.add(name, _risen(bench.live.serve(jobs, bench.paced())))
    found = runs["target"]
    mixed = median(found, lambda one: one.mixed)
    yield Claim("itl", "load 0.2x to 0.9x, after 60 s: P95 of mixed steps over the target", mixed, most=1.15)
    settled = median(found, lambda one: one.settled)
    yield Claim("itl", "load 0.2x to 0.9x: seconds until no window of five exceeds that", settled)
    spread = median(found, lambda one: one.spread)
    yield Claim("itl", "load 0.9x: all gaps, P99 over P50", spread, most=2.5)
    largest = median(found, lambda one: one.largest)
    yield Claim("itl", "load 0.9x: P99 of the largest gap over the target", largest, most=3.0)


def _risen(run: BenchRun) -> Risen:
    mixed = [step for step in run.steps if step.is_mixed and step.end > QUIET]
    ends = [(step.end - QUIET, step.seconds / TARGET) for step in mixed]
    late = [over for end, over in ends if end > SETTLED]
    windows: dict[int, list[float]] = {}
    for end, over in ends:
        windows.setdefault(int(end / WINDOW), []).append(over)
    bad = [number for number, overs in windows.items() if workloads.quantile(overs, 0.95) > 1.15]
    settled = WINDOW * (max(bad) + 1) if bad else 0.0
    busy = [record for record in run.records if record.job.at > QUIET]
    return Risen(workloads.quantile(late, 0.95), settled, run.itl(0.99) / run.itl(0.5), _largest(busy) / TARGET)


def _largest(records: Sequence[JobRecord]) -> float:
    return workloads.quantile([record.max_itl for record in records], 0.99)


def _ttft(records: Sequence[JobRecord]) -> float:
    return workloads.mean([record.ttft for record in records]) if records else math.nan
