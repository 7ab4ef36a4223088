"""Cases of `headway bench scheduler` with a bar: many requests with one common prefix, and rows that need feedback.

Both build the scheduler with what the server puts around it: a cost model, a pacer without a target and the backlog
that predicts waiting times. Steps are timed in thread CPU time, `schedule()` and `commit()` together; what the null
executor does between them does not count, nor does garbage collection: the engine does that there too.

common-prefix   20,000 requests wait, all with the same first 2,048 tokens, and the cache is cold. The first step, the
                four steps that compute the prefix and the one that finds all others ready are among those measured.
                `add()` is timed as well; the caller computes the prefix keys, so hashing is not part of it.
feedback        1,000 running rows whose next token can be planned only after the last one was collected: every one
                of them is a chunk of one token in every step.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

from headway.bench import scheduler as steady
from headway.bench.scheduler import BLOCK_SIZE, LANES, TENANTS, build
from headway.bench.virtual import A100
from headway.control.costs import CostModel
from headway.control.forecast import Backlog
from headway.control.pacer import TargetPacer
from headway.core.ledger import KVLedger
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity
from headway.engine.garbage import collect_young, settle_garbage
from headway.engine.null import NullExecutor
from headway.errors import ConfigError
from headway.kv.prefix import chain_keys, chain_seed, extend_keys
from headway.values.limits import Limits
from headway.values.params import SamplingParams

PREFIX, TAIL, OUTPUT = 2048, 16, 64
WAITING, SLOTS, STEP_TOKENS = 20_000, 256, 512  # the prefix takes four steps
STEPS = 400
REPEATS = 3
FEEDBACK_ROWS, FEEDBACK_STEPS, FEEDBACK_OUTPUT = 1000, 200, 1024


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One line of the table, in microseconds; `us_add` is the mean of one `add()`, None where it is not measured."""

    case: str
    policy: str
    queue: int
    running: int
    steps: int
    us_first: float
    us_max: float
    us_p99: float
    us_median: float
    us_add: float | None = None

    def over(self) -> list[str]:
        """The fields that exceed the bar of this case."""
        return [name for name, most in BARS[self.case].items() if getattr(self, name) > most]


BARS = {
    "common-prefix": {"us_first": 10_000.0, "us_max": 10_000.0, "us_p99": 3_000.0, "us_add": 20.0},
    "feedback": {"us_p99": 4_000.0},
}
"""Microseconds, by case and field."""


Timer = Callable[[], float]


class CaseBench:
    """A scheduler as the server builds it, over an executor that computes nothing; times its own steps."""

    def __init__(self, policy: str, limits: Limits, num_blocks: int, timer: Timer) -> None:
        costs = CostModel(A100)
        self.scheduler = Scheduler(
            KVLedger(num_blocks, BLOCK_SIZE),
            limits,
            build(policy),
            pacer=TargetPacer(costs, None, BLOCK_SIZE),
            costs=costs,
            observer=Backlog(),
        )
        self._executor = NullExecutor(Capacity(num_blocks, BLOCK_SIZE, limits.rows))
        self._timer = timer
        self._now = 0.0

    def add(self, requests: Iterable[Request]) -> float:
        """Seconds that all calls of `add` took together."""
        add, begin = self.scheduler.add, self._timer()
        for req in requests:
            add(req)
        return self._timer() - begin

    def step(self) -> float:
        """Microseconds spent in schedule and commit."""
        self._now += 0.01
        begin = self._timer()
        plan = self.scheduler.schedule(self._now)
        middle = self._timer()
        assert plan is not None, "nothing to compute: too few requests for so many steps"
        self._executor.submit(plan)
        collect_young()  # as the engine does
        result = self._executor.collect()
        resume = self._timer()
        self.scheduler.commit(plan, result)
        return (middle - begin + self._timer() - resume) * 1e6

    def measure(self, case: str, policy: str, steps: int, us_add: float | None = None) -> CaseRow:
        """A line of the table from so many steps, the first of which is the next one."""
        queue = self.scheduler.num_waiting
        costs = [self.step() for _ in range(steps)]
        first, ordered = costs[0], sorted(costs)
        return CaseRow(
            case=case,
            policy=policy,
            queue=queue,
            running=self.scheduler.num_running,
            steps=steps,
            us_first=round(first, 1),
            us_max=round(ordered[-1], 1),
            us_p99=round(ordered[int(len(ordered) * 0.99)], 1),
            us_median=round(statistics.median(ordered), 1),
            us_add=None if us_add is None else round(us_add, 2),
        )


def common_prefix(
    policy: str, waiting: int = WAITING, steps: int = STEPS, timer: Timer = time.thread_time, seed: int = 0
) -> CaseRow:
    """All requests are queued before the first step."""
    rng = random.Random(seed)
    prefix = rng.choices(range(50_000), k=PREFIX)
    chain = chain_seed("bench")
    keys = chain_keys(prefix, BLOCK_SIZE, chain)
    requests = []
    for id in range(waiting):
        tokens = prefix + rng.choices(range(50_000), k=TAIL)
        own = [bytes(bytearray(key)) for key in keys]  # equal to those of others and not the same objects, as served
        requests.append(
            _request(id, tokens, extend_keys(own, tokens, BLOCK_SIZE, chain, len(tokens)), chain, OUTPUT, rng)
        )
    num_blocks = (PREFIX + SLOTS * (TAIL + OUTPUT)) // BLOCK_SIZE + SLOTS
    bench = CaseBench(policy, Limits(SLOTS, STEP_TOKENS), num_blocks, timer)
    settle_garbage(has_loop=True)
    us_add = bench.add(requests) * 1e6 / waiting
    return bench.measure("common-prefix", policy, steps, us_add)


def feedback(
    policy: str,
    rows: int = FEEDBACK_ROWS,
    steps: int = FEEDBACK_STEPS,
    timer: Timer = time.thread_time,
    seed: int = 0,
) -> CaseRow:
    """All rows run and none ends while it is measured; prompts differ in length, so that rows grow in turn."""
    rng = random.Random(seed)
    chain = chain_seed("bench")
    requests = []
    for id in range(rows):
        tokens = rng.choices(range(50_000), k=BLOCK_SIZE + id % BLOCK_SIZE)
        req = _request(id, tokens, chain_keys(tokens, BLOCK_SIZE, chain), chain, FEEDBACK_OUTPUT, rng)
        req.needs_feedback = True
        requests.append(req)
    num_blocks = rows * math.ceil((2 * BLOCK_SIZE + FEEDBACK_OUTPUT) / BLOCK_SIZE)
    bench = CaseBench(policy, Limits(rows, rows + 64 * BLOCK_SIZE), num_blocks, timer)
    bench.add(requests)
    while bench.scheduler.num_waiting:
        bench.step()
    settle_garbage(has_loop=True)
    return bench.measure("feedback", policy, steps)


def _request(
    id: int, tokens: list[int], keys: list[bytes], chain: bytes, max_tokens: int, rng: random.Random
) -> Request:
    return Request(
        id,
        tokens,
        SamplingParams(max_tokens=max_tokens),
        arrival=id * 1e-6,
        keys=keys,
        chain=chain,
        tenant=f"tenant{rng.randrange(TENANTS)}",
        lane=LANES[id % len(LANES)],
        expected=rng.uniform(1.0, max_tokens),
    )


CASES: dict[str, Callable[[str], CaseRow]] = {"common-prefix": common_prefix, "feedback": feedback}


def measure_apart(case: str, policy: str, repeats: int = REPEATS) -> CaseRow:
    """The median of each figure over some runs, each in a process of its own: a server has one scheduler.

    In a process whose heap other schedulers have left in pieces the same steps take up to twice as long.
    """
    rows = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            rows.append(process.submit(CASES[case], policy).result())
    figures = [name for name in asdict(rows[0]) if name.startswith("us_") and getattr(rows[0], name) is not None]
    return replace(rows[0], **{name: statistics.median(getattr(row, name) for row in rows) for name in figures})


def run(
    cases: Sequence[str] = ("steady",),
    as_json: bool = False,
    policies: Iterable[str] | None = None,
    measure: Callable[[str, str], CaseRow] = measure_apart,
) -> int:
    """Print a line per configuration as it is measured; with `as_json` the last line is one object with all rows."""
    for case in cases:
        if case != "steady" and case not in CASES:
            raise ConfigError(f"there is no case {case!r}; there are: {', '.join(('steady', *CASES))}")
    named = steady.chosen(policies)
    rows: list[dict[str, object]] = []
    for case in cases:
        rows += steady.show(named) if case == "steady" else _show(case, named, measure)
    if as_json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    return 0


def _show(case: str, policies: Sequence[str], measure: Callable[[str, str], CaseRow]) -> list[dict[str, object]]:
    rows = []
    columns = ("running", "first", "max", "p99", "median", "add")
    print(f"{'case':14} {'policy':10} {'queue':>8} " + " ".join(f"{name:>9}" for name in columns))
    for policy in policies:
        row = measure(case, policy)
        rows.append(asdict(row))
        add = "" if row.us_add is None else f"{row.us_add:.1f}"
        verdict = "over: " + ", ".join(row.over()) if row.over() else "ok"
        print(
            f"{row.case:14} {row.policy:10} {row.queue:8} {row.running:9} {row.us_first:9.1f} {row.us_max:9.1f} "
            f"{row.us_p99:9.1f} {row.us_median:9.1f} {add:>9}  {verdict}",
            flush=True,
        )
    bars = ", ".join(f"{name} {most:g}" for name, most in BARS[case].items())
    print(f"bars in us: {bars}", flush=True)
    return rows
