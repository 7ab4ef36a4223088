"""The cost of a step does not grow with the queue: processor time of the scheduler, the one case that is not virtual.

Times differ from run to run, so they go to standard error; standard output says how many were too long.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway import plugins
from headway.bench.policy.claim import Claim
from headway.bench.scheduler import CommonLoad, FullLoad, Load
from headway.bench.scheduler_cases import BARS, WAITING, common_prefix
from headway.bench.virtual import EngineSetup, Job, simulate
from headway.engine.garbage import settle_garbage
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Limits

SHALLOW, DEEP = 100, 100_000
RUNNING, STEPS = 256, 500
RATIO, MORE_US = 1.2, 20.0
ABORTS_S, STEP_S = 0.5, 5e-3
KEPT = 0.9


def deep(seed: int) -> Iterator[Claim]:
    """Every policy with 100 and with 100,000 waiting; half of those aborted; many short requests."""
    policies = (*plugins.names("policies"), "lanes")
    for kind, when in ((Load, "slots full"), (FullLoad, "memory full"), (CommonLoad, "a common prefix")):
        slow = sum(_is_slower(kind, policy, seed, when) for policy in policies)
        what = f"{when}: policies of {len(policies)} that are slower at 100,000 waiting"
        yield Claim("deep", what, float(slow), most=0.0)
    yield from _cold_prefix(policies)
    total, longest = _abort_half(seed)
    yield Claim("deep", "aborting half of 100,000 takes 0.5 s or more (1: it does)", float(total >= ABORTS_S), most=0.0)
    yield Claim("deep", "steps above 5 ms while they are aborted", float(longest), most=0.0)
    pairs = [(_short_ones(1_000), _short_ones(10_000)) for _ in range(3)]
    few, many = pairs[0]
    ratio = many.virtual / few.virtual
    yield Claim("deep", "16 in, 16 out: requests per virtual second, 10,000 over 1,000", ratio, least=KEPT)
    slower = statistics.median(many.real / few.real for few, many in pairs) < KEPT
    yield Claim("deep", "the same per second of the processor is below 0.9 (1: it is)", float(slower), most=0.0)


def _cold_prefix(policies: Sequence[str]) -> Iterator[Claim]:
    """All requests wait for a common prefix that is not cached yet: no step may cost time linear in the queue."""
    over = {"first": 0, "max": 0, "p99": 0, "add": 0}
    for policy in policies:
        row = common_prefix(policy)
        sys.stderr.write(f"  {policy:10} cold prefix: {row}\n")
        for name in row.over():
            over[name.removeprefix("us_")] += 1
    for name, num_over in over.items():
        bar = BARS["common-prefix"][f"us_{name}"]
        what = f"cold prefix, {WAITING:,} waiting: policies whose {name} is above {bar:,.0f} us"
        yield Claim("deep", what, float(num_over), most=0.0)


def _is_slower(kind: type[Load], policy: str, seed: int, when: str) -> bool:
    """Both depths take turns, so that whatever else the machine does falls on both."""
    loads = [kind(policy, RUNNING, depth, seed, time.thread_time) for depth in (SHALLOW, DEEP)]
    times: tuple[list[float], list[float]] = ([], [])
    for load in loads:
        load.warm_up()
    settle_garbage()
    for _ in range(STEPS):
        for load, found in zip(loads, times, strict=True):
            load.disturb()
            load.top_up()
            load.step()
            found.append(load.schedule_us)
    shallow, full = map(statistics.median, times)
    sys.stderr.write(f"  {policy:10} {when}: schedule() at {SHALLOW}: {shallow:.0f} us, at {DEEP}: {full:.0f} us\n")
    return full >= RATIO * shallow and full - shallow >= MORE_US


def _abort_half(seed: int) -> tuple[float, int]:
    """Seconds for all aborts, and how many steps between them took too long."""
    load = Load("sjf", RUNNING, DEEP, seed, time.thread_time)
    load.warm_up()
    settle_garbage()
    gone = [id for id in load.waiting if load.waits(id)][::2]
    spent, longest, too_long = 0.0, 0.0, 0
    for start in range(0, len(gone), 500):
        begin = time.thread_time()
        for id in gone[start : start + 500]:
            load.scheduler.abort(id)
        spent += time.thread_time() - begin
        load.step()
        longest = max(longest, load.schedule_us)
        too_long += load.schedule_us > STEP_S * 1e6
    sys.stderr.write(f"  {len(gone)} aborts: {spent:.3f} s, longest schedule(): {longest:.0f} us\n")
    return spent, too_long


class _Rate(NamedTuple):
    virtual: float
    real: float


def _short_ones(count: int) -> _Rate:
    """Requests per second, all there at the start: by the virtual clock, and by the processor's time."""
    jobs = [Job(0.0, 16, 16) for _ in range(count)]
    begin = time.thread_time()
    run = simulate(jobs, EngineSetup(FirstComeFirstServed, Limits(RUNNING, 4096)))
    seconds = time.thread_time() - begin
    assert all(record.is_answered for record in run.records)
    sys.stderr.write(f"  {count} requests of 16 in, 16 out: {count / seconds:.0f} per second of processor time\n")
    return _Rate(count / run.makespan, count / seconds)
