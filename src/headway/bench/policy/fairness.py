"""Shares: tenants, weights, lanes and strict classes.

Two tenants send 1.5 and 3 requests a second, 256 tokens in and out, for six minutes, to an engine that serves about two
a second: both always have requests waiting. Service counts prompt tokens once and generated tokens twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from headway.bench.policy import workloads
from headway.bench.policy.claim import Claim
from headway.bench.virtual import BenchRun, EngineSetup, Job, simulate
from headway.core.policy import Policy
from headway.policies._shared import Laned, Shared
from headway.policies.fair import Fair
from headway.policies.fcfs import FirstComeFirstServed
from headway.policies.priority import Priority
from headway.values.limits import Limits

SLOTS, LENGTH = 12, 256
SECONDS = 360.0
RATES = {"ann": 1.5, "bob": 3.0}
LANES = {"interactive": 80.0, "batch": 20.0}


def fairness(seed: int) -> Iterator[Claim]:
    """Tenants, lanes, classes."""
    yield from _tenants(seed)
    yield from _lanes(seed)
    yield from _classes(seed)


def _tenants(seed: int) -> Iterator[Claim]:
    jobs = _stream(seed, RATES)
    fcfs = _serve(jobs, FirstComeFirstServed, SECONDS)
    fair = _serve(jobs, Fair, SECONDS)
    weighed = _serve(jobs, lambda: Fair({"ann": 1.0, "bob": 2.0}), SECONDS)
    yield Claim("fairness", "fcfs: service of the busier tenant over the other's", _ratio(_service(fcfs)))
    yield Claim("fairness", "fair: larger over smaller service", _apart(_service(fair)), 1.0, 1.05)
    yield Claim(
        "fairness", "weights 1 to 2: service of the second over the first's", _ratio(_service(weighed)), 1.9, 2.1
    )
    yield Claim("fairness", "fair: throughput over fcfs", fair.generated / fcfs.generated, least=0.98)
    yield from _idle_then_burst(seed)


def _idle_then_burst(seed: int) -> Iterator[Claim]:
    """One tenant keeps the engine busy for three minutes; then the other sends a burst."""
    half = SECONDS / 2
    alone = _stream(seed, {"bob": 3.0})
    jobs = alone + [Job(half, LENGTH, LENGTH, tenant="ann") for _ in range(600)]
    before, after = _service(_serve(jobs, Fair, half)), _service(_serve(jobs, Fair, SECONDS))
    since = {name: after[name] - before.get(name, 0.0) for name in after}
    yield Claim(
        "fairness", "idle, then a burst: its service over the other's since", since["ann"] / since["bob"], 0.95, 1.05
    )
    kept = _serve(alone, Fair, half).generated / _serve(alone, FirstComeFirstServed, half).generated
    yield Claim("fairness", "one tenant alone: throughput over fcfs", kept, least=0.98)


def _lanes(seed: int) -> Iterator[Claim]:
    full = _serve(_stream(seed, dict.fromkeys(LANES, 3.0)), _in_lanes, SECONDS)
    yield Claim(
        "fairness",
        "lanes 80 and 20, both full: service of the first over the second's",
        _apart(_service(full)),
        3.8,
        4.2,
    )
    quiet = _stream(seed, {"interactive": 0.3, "batch": 3.0})
    kept = _serve(quiet, _in_lanes, SECONDS).generated / _serve(quiet, FirstComeFirstServed, SECONDS).generated
    yield Claim("fairness", "lanes 80 and 20, the first nearly idle: throughput over fcfs", kept, least=0.98)
    yield from _long_batch(seed)


def _long_batch(seed: int) -> Iterator[Claim]:
    """Batch requests with long answers hold all slots; now and then an interactive request arrives."""
    batch = [Job(0.0, LENGTH, 2000, tenant="batch", lane="batch") for _ in range(4 * SLOTS)]
    few = [Job(at, LENGTH, 64, lane="interactive") for at in workloads.poisson(random.Random(seed), 0.3, SECONDS)]
    run, plain = (simulate(batch + few, _setup(how, 2000)) for how in (_in_lanes, _without_preemption))
    first = [
        workloads.mean([record.ttft for record in each.records if record.job.lane == "interactive"])
        for each in (run, plain)
    ]
    yield Claim("fairness", "long batch answers: mean ttft of the others without preemption, in s", first[1])
    yield Claim("fairness", "long batch answers: mean ttft of the others, of that", first[0] / first[1], most=0.1)
    yield Claim(
        "fairness", "long batch answers: throughput over that", run.tokens_per_s / plain.tokens_per_s, least=0.98
    )
    most = float(run.most_preemptions)
    yield Claim("fairness", "long batch answers: most preemptions of one request", most, most=3.0)


def _classes(seed: int) -> Iterator[Claim]:
    """An urgent request arrives while less urgent ones hold every slot; then all requests are equally urgent."""
    low = [Job(0.0, LENGTH, LENGTH, priority=1) for _ in range(3 * SLOTS)]
    for what, blocks in (("slots", _ENOUGH), ("memory", SLOTS * LENGTH // 16 + 2)):
        run = simulate([*low, Job(2.0, LENGTH, LENGTH, priority=0)], _setup(Priority, blocks))
        urgent = next(record for record in run.records if record.job.priority == 0)
        assert urgent.output is not None
        assert urgent.output.timing is not None
        steps = math.ceil(urgent.output.timing.queued_s / min(step.seconds for step in run.steps))
        yield Claim("fairness", f"priority: steps an urgent one waits for {what}", float(steps), most=2.0)
    yield _under_way(seed)
    equal = _serve(_stream(seed, RATES), Priority, SECONDS)
    yield Claim("fairness", "priority: preemptions in a stream of equals", float(equal.preemptions), most=0.0)


def _under_way(seed: int) -> Claim:
    """Slots are free, but less urgent requests hold every place for a partial prefill."""
    low = [Job(0.0, 8000, LENGTH, priority=1) for _ in range(SLOTS // 2)]
    few = [Job(at, LENGTH, 16, priority=0) for at in workloads.poisson(random.Random(seed), 1.0, 5.0)]
    run = simulate(low + few, _setup(Priority, 4 * _ENOUGH))
    waits = []
    for record in run.records:
        if record.job.priority == 0 and record.output and record.output.timing:
            admitted = record.taken + record.output.timing.queued_s
            waits.append(sum(record.taken < step.end <= admitted + 1e-9 for step in run.steps))
    return Claim("fairness", "priority: steps an urgent one waits for partial prefills", float(max(waits)), most=2.0)


_ENOUGH = 4 * SLOTS * LENGTH // 16


def _in_lanes() -> Policy:
    return Laned(FirstComeFirstServed(), fair=False, lanes=LANES)


def _without_preemption() -> Policy:
    return Shared(FirstComeFirstServed(), fair=False, lanes=LANES)


def _stream(seed: int, rates: Mapping[str, float]) -> list[Job]:
    """Arrivals at each tenant's rate; the lane has the tenant's name."""
    rng = random.Random(seed)
    return [
        Job(at, LENGTH, LENGTH, tenant=name, lane=name)
        for name, rate in rates.items()
        for at in workloads.poisson(rng, rate, SECONDS)
    ]


def _setup(policy: Callable[[], Policy], num_blocks: int = _ENOUGH) -> EngineSetup:
    return EngineSetup(policy, Limits(SLOTS, 1024), num_blocks=num_blocks)


def _serve(jobs: Sequence[Job], policy: Callable[[], Policy], until: float) -> BenchRun:
    return simulate(jobs, _setup(policy), until)


def _service(run: BenchRun) -> dict[str, float]:
    given: dict[str, float] = {}
    for record in run.records:
        if record.num_tokens:
            given[record.job.tenant] = (
                given.get(record.job.tenant, 0.0) + record.job.num_prompt + 2.0 * record.num_tokens
            )
    return given


def _ratio(service: Mapping[str, float]) -> float:
    return service["bob"] / service["ann"]


def _apart(service: Mapping[str, float]) -> float:
    return max(service.values()) / min(service.values())
