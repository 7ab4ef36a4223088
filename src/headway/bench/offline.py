"""Output tokens per second of a workload without a server, beside the machine's limit and our own baselines.

All requests arrive at the start; greedy, no early stop, prefix caching off, a pool in which all running requests fit.
Several engines take turns, round by round, and the medians count: on a shared machine only interleaved runs
compare. What the machine can do is measured before and after every round; the best of it makes the limit.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from headway.backends.cpu import LoadedCpu, load_model
from headway.bench import machine
from headway.bench.baseline import Answers, Static, room_per_slot
from headway.bench.console import Update, print_json, print_table, progress
from headway.bench.limit import Machine, Matrices, limit
from headway.bench.setup import ModelSetup, at_least_one, describe, pool_blocks, submit_of
from headway.bench.workload import WorkItem, fit, named
from headway.build import build_engine
from headway.config import EngineConfig
from headway.engine.garbage import settle_garbage
from headway.errors import ConfigError, EngineError
from headway.kernels.formats import resolve_kv_dtype
from headway.runner.kvstore import KVStore

WARM_UP = (WorkItem([1, 2, 3], 2),)  # starts threads and fills caches; not timed
ENGINES = "naive, continuous, or static and a number of slots, as in static8"


@dataclass(frozen=True, slots=True)
class OfflineJob:
    """What runs in every round: one workload over one model."""

    works: Sequence[WorkItem]
    slots: int
    is_contiguous: bool = False  # one block per request: a cache without paging

    @property
    def in_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    @property
    def out_tokens(self) -> int:
        return sum(work.max_tokens for work in self.works)

    def config(self, setup: ModelSetup) -> EngineConfig:
        block_size = _whole_context(self.works) if self.is_contiguous else 16
        return setup.config(
            block_size=block_size,
            num_blocks=pool_blocks(self.works, self.slots, block_size),
            prefix_caching=False,
            touch_kv=True,
            max_num_seqs=self.slots,
            max_num_batched_tokens=max(512, self.slots),
            max_waiting=len(self.works),
        )


@dataclass(slots=True)
class Runs:
    """What one engine did, round by round."""

    engine: str
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    peak_bytes: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def run(
    setup: ModelSetup,
    *,
    workload: str = "chat-mix",
    requests: int | None = None,
    seed: int = 0,
    engine: str = "continuous",
    slots: int | None = None,
    rounds: int = 1,
    is_contiguous: bool = False,
    as_json: bool = False,
) -> int:
    """Print a line per engine; with `as_json` the last line is one object, of the first engine named."""
    at_least_one(requests=requests, slots=slots, rounds=rounds)
    kind, engines = named(workload), [name.strip() for name in engine.split(",")]
    for name in engines:
        static_slots(name)
    count = requests or kind.requests
    job = OfflineJob(kind.make(count, seed), min(count, slots or kind.slots), is_contiguous)
    config = job.config(setup)
    loaded = load_model(config)
    job = OfflineJob(fit(job.works, loaded.spec.vocab_size, loaded.spec.max_len), job.slots, is_contiguous)
    runs, best = measure(job, config, loaded, engines, rounds)
    dtype = loaded.device.dtype
    bound = limit(job.works, job.slots, Matrices.of(loaded.spec, dtype), best)
    facts: dict[str, object] = {"workload": workload, "seed": seed, "slots": job.slots, "rounds": rounds}
    facts |= describe(loaded, config) | {"block_size": config.cache.block_size, "contiguous": is_contiguous}
    facts |= {"peak_gflops": round(best.flops / 1e9, 1), "read_gb_s": round(best.read_bytes / 1e9, 2)}
    rows = [_record(job, one, bound) | {"first_is": round(one.median_s / runs[0].median_s, 4)} for one in runs]
    _show(rows, f"{workload}, {count} requests, {facts['slots']} slots, {dtype}, {facts['kernels']}")
    if as_json:
        others: dict[str, object] = {"rows": rows} if len(rows) > 1 else {}
        print_json(rows[0] | facts | others)
    return 0


def measure(
    job: OfflineJob, config: EngineConfig, loaded: LoadedCpu, engines: Sequence[str], rounds: int
) -> tuple[list[Runs], Machine]:
    """Let the engines take turns; the machine's best of all rounds."""
    runs = [Runs(name) for name in engines]
    kernels, threads = loaded.device.kernels, loaded.device.threads
    # Before the engines only where the gigabyte that is read would not count as their memory.
    seen = [machine.measure(kernels, threads)] if machine.forget_peak_memory() else []
    for round_ in range(rounds):
        for one in runs:
            with progress(f"{one.engine} {round_ + 1}/{rounds}", job.out_tokens) as update:
                _one_round(one, job, config, loaded, update)
        seen.append(machine.measure(kernels, threads))
    return runs, Machine(max(one.flops for one in seen), max(one.read_bytes for one in seen))


def _one_round(one: Runs, job: OfflineJob, config: EngineConfig, loaded: LoadedCpu, update: Update) -> None:
    machine.forget_peak_memory()
    with closing(open_engine(one.engine, job, config, loaded)) as engine:
        engine.answer(WARM_UP, lambda done: None)
        settle_garbage()
        began = time.perf_counter()
        answers = engine.answer(job.works, update)
        one.seconds.append(time.perf_counter() - began)
    one.peak_bytes = max(one.peak_bytes, machine.peak_memory())
    one.steps = answers.steps
    got, wanted = [len(tokens) for tokens in answers.tokens], [work.max_tokens for work in job.works]
    if got != wanted:
        id = next(id for id, count in enumerate(got) if count != wanted[id])
        raise EngineError(f"{one.engine} gave request {id} {got[id]} tokens of {wanted[id]}; this is a bug of headway")


def open_engine(name: str, job: OfflineJob, config: EngineConfig, loaded: LoadedCpu) -> Continuous | Static:
    """The named engine with memory for this job; to be closed."""
    slots = static_slots(name)
    if slots is None:
        return Continuous(config, loaded)
    spec, slots = loaded.spec, min(slots, len(job.works))
    kv = KVStore(
        layers=spec.layers,
        num_blocks=slots,
        block_size=room_per_slot(job.works, slots),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=resolve_kv_dtype(config.cache.kv_dtype, loaded.device.dtype),
    )
    kv.touch()
    return Static(loaded.decoder, kv, slots, config.scheduler.num_tokens)


def static_slots(engine: str) -> int | None:
    """Slots of a baseline; None for continuous batching."""
    if engine in ("continuous", "naive"):
        return 1 if engine == "naive" else None
    match = re.fullmatch(r"static([1-9][0-9]{0,3})", engine)
    if match is None:
        raise ConfigError(f"engine is {engine!r}; allowed: {ENGINES}")
    return int(match[1])


class Continuous:
    """The production engine in this thread; nothing of one run is left for the next but touched pages."""

    def __init__(self, config: EngineConfig, loaded: LoadedCpu) -> None:
        self.engine = build_engine(config, loaded, keeps_tokens=True)

    def answer(self, works: Sequence[WorkItem], update: Update) -> Answers:
        engine = self.engine
        answers: list[list[int]] = [[] for _ in works]
        done, steps = 0, engine.stats().steps
        for id, work in enumerate(works):
            engine.add(submit_of(id, work))
        while engine.has_work:
            emission = engine.step()
            done += len(emission.tokens)
            update(done)
            for output in emission.finished:
                answers[output.id] = list(output.tokens)
        return Answers(answers, engine.stats().steps - steps)

    def close(self) -> None:
        self.engine.close()


def _whole_context(works: Sequence[WorkItem]) -> int:
    longest = max(len(work.tokens) + work.max_tokens for work in works)
    return -(-longest // 16) * 16


def _record(job: OfflineJob, one: Runs, bound: float) -> dict[str, object]:
    speed = job.out_tokens / one.median_s
    return {
        "engine": one.engine,
        "n": len(job.works),
        "s": round(one.median_s, 6),
        "in_tok": job.in_tokens,
        "out_tok": job.out_tokens,
        "out_tok_s": round(speed, 1),
        "limit_tok_s": round(bound, 1),
        "of_limit": round(speed / bound, 3),
        "steps": one.steps,
        "runs_s": [round(seconds, 6) for seconds in one.seconds],
        "peak_rss_mb": round(one.peak_bytes / 1e6),
    }


def _show(rows: Sequence[dict[str, object]], title: str) -> None:
    names = ("engine", "s", "out_tok_s", "limit_tok_s", "of_limit", "steps", "peak_rss_mb", "first_is")
    print_table(names, [[row[name] for name in names] for row in rows], title)
