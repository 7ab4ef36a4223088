"""What a step of the scheduler costs, with nothing behind it: the null executor does everything but the maths.

Each measured step finishes one row in 64 and admits as many, takes as many arrivals, two aborts and one
preemption. Everything the scheduler does is timed: `schedule` and `commit`, and also the aborts and the
preemption; arrivals are not (their keys are hashed by the caller of `add`). Queue depth is the number of requests
that wait throughout. The budget is 1 us per running row plus 30 us per request that joins or leaves. This is the case
`steady`; `scheduler_cases` has the others.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from headway import plugins
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity
from headway.engine.garbage import settle_garbage
from headway.engine.null import NullExecutor
from headway.errors import ConfigError
from headway.kv.prefix import chain_keys, chain_seed
from headway.policies._shared import Laned
from headway.policies.sjf import ShortestJobFirst
from headway.values.limits import Admission, Limits
from headway.values.params import SamplingParams
from headway.values.states import State

BLOCK_SIZE = 16
PROMPT = 16
COMMON = 256  # tokens that prompts share where they share any
OUTPUT = 64
RUNNING = (256, 1000)
QUEUES = (100, 1_000, 10_000, 100_000)
PREFILLING = 16  # steps after which every slot that memory allows is taken
LONG = 1024  # tokens of an answer that does not end while it is measured
TENANTS = 16  # few enough that each has a request waiting in either lane at any depth
LANES = ("interactive", "batch")


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """One line of the table. `budget_us` is the budget above for the changes that this run made."""

    case: str
    policy: str
    queue: int
    running: int
    us_per_step: float
    p99_us: float
    us_per_row: float
    changes_per_step: float
    budget_us: float
    us_max: float
    us_p99: float  # these two are `p99_us` and `us_per_step`, under the names that every case has
    us_median: float


def chosen(policies: Iterable[str] | None) -> list[str]:
    """The policies to measure: those that are named, each of which must be one; all of them, and lanes, if none is."""
    every = [*plugins.names("policies"), "lanes"]
    named = list(policies or every)
    for name in named:
        if name not in every and ":" not in name:
            raise ConfigError(f"there is no policy {name!r}; there are: {', '.join(every)}, or my.module:Thing")
        if name != "lanes":
            plugins.load("policies", name)
    return named


def build(policy: str) -> Policy:
    """A policy by name; `lanes` means tenants within two lanes, shortest job first within each."""
    if policy == "lanes":
        return Laned(ShortestJobFirst(), lanes={"interactive": 80.0, "batch": 20.0})
    plugin: Policy = plugins.load("policies", policy)()
    return plugin


class Load:
    """Keeps a scheduler in steady state: slots full, the queue at its depth, the same changes in every step."""

    output: ClassVar[int] = OUTPUT

    def __init__(
        self, policy: str, running: int, queue: int, seed: int, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rng = random.Random(seed)
        self.running, self.queue = running, queue
        num_blocks, limits = self._memory(), self._limits()
        self.ledger = KVLedger(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.ledger, limits, build(policy))
        self.executor = NullExecutor(Capacity(num_blocks, BLOCK_SIZE, limits.rows))
        self.chain = chain_seed("bench")
        self.waiting: list[int] = []
        self.next_id = 0
        self.now = 0.0
        self.schedule_us = 0.0  # of the last step
        self._timer = timer

    def _memory(self) -> int:
        return self.running * (PROMPT + OUTPUT + BLOCK_SIZE) // BLOCK_SIZE + 64

    def _limits(self) -> Limits:
        return Limits(self.running, self.running + 64 * PROMPT)

    def arrive(self, count: int) -> None:
        for _ in range(count):
            tokens = self._prompt()
            keys = chain_keys(tokens, BLOCK_SIZE, self.chain)
            req = Request(
                self.next_id,
                tokens,
                SamplingParams(max_tokens=self.output),
                arrival=self.now,
                keys=keys,
                chain=self.chain,
                tenant=f"tenant{self.rng.randrange(TENANTS)}",
                lane=self._lane(self.next_id),
                expected=self.rng.uniform(1.0, self.output),
            )
            self.next_id += 1
            self.scheduler.add(req)
            self.waiting.append(req.id)

    def _prompt(self) -> list[int]:
        return self.rng.choices(range(50_000), k=PROMPT)

    def _lane(self, id: int) -> str:
        return LANES[id % 2]

    def disturb(self) -> float:
        """Two aborts, one of a running and one of a waiting request, and one preemption; microseconds it took."""
        gone, victim = self.rng.sample(self.scheduler.state.rows.running(), 2)
        waiting = self._pop_waiting()
        begin = self._timer()
        self.scheduler.abort(gone.id)
        self.scheduler.abort(waiting)
        preempt(self.scheduler.state, victim)
        return (self._timer() - begin) * 1e6

    def _pop_waiting(self) -> int:
        """One of the younger waiting requests; some of `self.waiting` may be running by now, others preempted."""
        while True:
            if not self.waiting:
                self.waiting = [id for id in self.scheduler.state.live if self.waits(id)]
            id = self.waiting.pop(self.rng.randrange(max(0, len(self.waiting) - self.queue // 2), len(self.waiting)))
            if self.waits(id):
                return id

    def waits(self, id: int) -> bool:
        req = self.scheduler.state.live.get(id)
        return req is not None and req.state is State.WAITING

    def step(self) -> tuple[float, int]:
        """Microseconds spent in schedule and commit, and how many requests joined or left."""
        self.now += 0.01
        begin = self._timer()
        plan = self.scheduler.schedule(self.now)
        middle = self._timer()
        assert plan is not None
        self.executor.submit(plan)
        result = self.executor.collect()
        resume = self._timer()
        told = self.scheduler.commit(plan, result)
        end = self._timer()
        self.schedule_us = (middle - begin) * 1e6
        return (middle - begin + end - resume) * 1e6, len(plan.joins) + len(told.finished)

    def warm_up(self) -> None:
        """Fill the slots one 64th at a time, so that later one row in 64 ends in every step."""
        share = self.running // OUTPUT + 1
        for _ in range(OUTPUT):
            self.arrive(share)
            self.step()
        self.arrive(self.queue - self.scheduler.num_waiting)

    def top_up(self) -> None:
        self.arrive(max(0, self.queue - self.scheduler.num_waiting))
        if len(self.waiting) > 4 * self.queue + 1000:
            self.waiting = [id for id in self.waiting if self.waits(id)]


class FullLoad(Load):
    """Memory is full throughout: slots are free, no request ends, and no request tried for admission fits.

    In every step one waiting request is aborted and another arrives. All running requests are of the first lane, which
    no request preempts.
    """

    output: ClassVar[int] = LONG

    def _memory(self) -> int:
        return self.running * (PROMPT + LONG) // BLOCK_SIZE + 4

    def _limits(self) -> Limits:
        return Limits(2 * self.running, 2 * self.running + 64 * PROMPT, admission=Admission.RESERVE)

    def _lane(self, id: int) -> str:
        return LANES[0] if id < self.running else super()._lane(id)

    def warm_up(self) -> None:
        self.arrive(self.running)
        for _ in range(PREFILLING):
            self.step()
        self.arrive(self.queue - self.scheduler.num_waiting)

    def disturb(self) -> float:
        waiting = self._pop_waiting()
        begin = self._timer()
        self.scheduler.abort(waiting)
        return (self._timer() - begin) * 1e6


class CommonLoad(Load):
    """All prompts begin with the same `COMMON` tokens, which are in the cache once the first of them is computed."""

    def __init__(
        self, policy: str, running: int, queue: int, seed: int, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(policy, running, queue, seed, timer)
        self._common = self.rng.choices(range(50_000), k=COMMON)

    def _memory(self) -> int:
        return super()._memory() + COMMON // BLOCK_SIZE

    def _limits(self) -> Limits:
        return Limits(self.running, self.running + 64 * PROMPT + COMMON)

    def _prompt(self) -> list[int]:
        return self._common + super()._prompt()


def measure(policy: str, running: int, queue: int, steps: int, seed: int = 0) -> SchedulerRow:
    """Run one configuration and say what a step cost."""
    load = Load(policy, running, queue, seed)
    load.warm_up()
    settle_garbage()
    costs: list[float] = []
    changes = 0
    for _ in range(steps):
        load.top_up()
        disturbance = load.disturb()
        cost, moved = load.step()
        costs.append(disturbance + cost)
        changes += moved + 3  # two aborted and one preempted have left
    costs.sort()
    median, per_step = statistics.median(costs), changes / steps
    p99 = round(costs[int(len(costs) * 0.99)], 1)
    return SchedulerRow(
        case="steady",
        policy=policy,
        queue=queue,
        running=running,
        us_per_step=round(median, 1),
        p99_us=p99,
        us_per_row=round(median / running, 3),
        changes_per_step=round(per_step, 1),
        budget_us=round(running + 30 * per_step, 1),
        us_max=round(costs[-1], 1),
        us_p99=p99,
        us_median=round(median, 1),
    )


def measure_all(policies: Iterable[str], steps: int) -> Iterator[SchedulerRow]:
    for policy in policies:
        for running in RUNNING:
            for queue in QUEUES:
                yield measure(policy, running, queue, steps)


def run(as_json: bool = False, steps: int = 1000, policies: Iterable[str] | None = None) -> int:
    """Print a line per configuration as it is measured; with `as_json` the last line is one object with all rows."""
    rows = show(chosen(policies), steps)
    if as_json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    return 0


def show(policies: Iterable[str], steps: int = 1000) -> list[dict[str, object]]:
    """Print the table, and return its rows."""
    rows = []
    print(f"{'policy':10} {'running':>8} {'queue':>8} {'us/step':>9} {'p99':>9} {'changes':>8} {'budget':>8}")
    for row in measure_all(policies, steps):
        rows.append(asdict(row))
        print(
            f"{row.policy:10} {row.running:8} {row.queue:8} {row.us_per_step:9.1f} {row.p99_us:9.1f} "
            f"{row.changes_per_step:8.1f} {row.budget_us:8.1f}",
            flush=True,
        )
    return rows
