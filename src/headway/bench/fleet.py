"""Many engines behind one route under a virtual clock: what a route finds in caches, and how evenly it loads engines.

Scheduler, ledger, loop and route are those of service; time is a cost model's. Engines meet only where a request is
routed, so between two arrivals each runs on by itself. What they tell (load, blocks) reaches the route `delay` later.

    arrival ─▶ every engine runs up to now ─▶ what they told by now - delay reaches the route ─▶ route ─▶ engine
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from headway.bench.virtual import EngineSetup, World
from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import Route, load_route, new_tokens
from headway.control.costs import CostWeights
from headway.engine.client import Submit
from headway.engine.messages import BlockNews
from headway.engine.published import Published
from headway.errors import ConfigError
from headway.policies.fcfs import FirstComeFirstServed
from headway.values.limits import Limits
from headway.values.params import SamplingParams

# Llama-3.1-8b on one H200, from the step times in docs/log.md: 4.1 ms for one row, 22 us per prompt token.
H200 = CostWeights(base=4.1e-3, tokens=22e-6, pairs=2.2e-9, decode=3e-6, context=32e-9)
ROUTES = ("cost", "least_loaded", "round_robin")
_UNIQUE = 1 << 30  # token ids from here on occur in one prompt alone


@dataclass(frozen=True, slots=True)
class TraceArrival:
    """A request of a trace: its prompt is these blocks, the last of which may be shorter."""

    at: float
    blocks: Sequence[int]
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """How many engines of which size, and how old what they tell is when a request is routed."""

    num_replicas: int = 8
    num_blocks: int = 1_000  # of each engine
    block_size: int = 512
    slots: int = 256
    delay: float = 0.005
    weights: CostWeights = H200


@dataclass(slots=True)
class FleetReport:
    """What came of a run."""

    num_requests: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_repeated: int = 0  # requests of which some engine held a first block when they were routed
    num_reached: int = 0  # of these: sent to an engine that held it
    num_quiet: int = 0  # requests that came to an engine without any other, with nothing under way to the route
    num_wrong: int = 0  # of these: not as many cached tokens as the route expected
    busy: list[float] = field(default_factory=list)  # seconds of steps, by engine
    ttfts: list[float] = field(default_factory=list)
    makespan: float = 0.0

    @property
    def hit_ratio(self) -> float:
        return self.num_cached / self.num_prompt

    @property
    def skew(self) -> float:
        """Time in steps of the busiest engine over the mean of all."""
        return max(self.busy) / fmean(self.busy)

    @property
    def reached(self) -> float:
        return self.num_reached / max(1, self.num_repeated)

    def row(self, name: str) -> dict[str, object]:
        """What is printed."""
        ordered = sorted(self.ttfts)
        return {
            "route": name,
            "requests": self.num_requests,
            "hit_ratio": round(self.hit_ratio, 4),
            "repeats_reached": round(self.reached, 4),
            "skew": round(self.skew, 3),
            "busy": round(fmean(self.busy) / self.makespan, 3),
            "ttft_mean_s": round(fmean(ordered), 4),
            "ttft_p99_s": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
            "quiet": self.num_quiet,
            "quiet_wrong": self.num_wrong,
        }


class _Facts:
    """What routes ask of the engine behind a replica."""

    def __init__(self, world: World, name: str) -> None:
        self.info = world.engine.info
        self.name = name


class _Node:
    """One engine and what it has told that is still on its way."""

    def __init__(self, number: int, setup: FleetSetup) -> None:
        limits = Limits(setup.slots, 8192)
        made = EngineSetup(
            FirstComeFirstServed, limits, setup.weights, setup.num_blocks, caches=True, block_size=setup.block_size
        )
        self.world = World(made)
        self.world.engine.watch_blocks()
        self.replica = Replica(number, cast(Any, _Facts(self.world, str(number))))
        self.told: deque[tuple[float, Published | BlockNews]] = deque()
        self.arrived: dict[int, float] = {}
        self.expected: dict[int, int] = {}  # cached tokens, of requests that came in quiet
        self.busy = 0.0

    def run(self, until: float, report: FleetReport) -> None:
        """Step by step up to a time; a step that has begun is finished."""
        engine, clock = self.world.engine, self.world.clock
        while engine.has_work and clock.now() < until:
            before = clock.now()
            emission = engine.step()
            now = clock.now()
            self.busy += now - before
            for id in emission.ids:
                came = self.arrived.pop(id, None)
                if came is not None:
                    report.ttfts.append(now - came)
            for output in emission.finished:
                report.num_cached += output.cached_tokens
                wanted = self.expected.pop(output.id, output.cached_tokens)
                report.num_wrong += wanted != output.cached_tokens
                self.replica.gone(output.id)
            self.listen()
            if emission.idle_s is not None and now == before:
                clock.advance(1e-3)

    def listen(self) -> None:
        """What the engine has to tell goes on its way."""
        engine, now = self.world.engine, self.world.clock.now()
        for said in (engine.news(), engine.block_news()):
            if said is not None:
                self.told.append((now, said))


def simulate_fleet(arrivals: Sequence[TraceArrival], setup: FleetSetup, route: Route) -> FleetReport:
    """Serve all of them; equal arguments give equal reports."""
    report, index = FleetReport(), HolderIndex()
    nodes = [_Node(number, setup) for number in range(setup.num_replicas)]
    for id, arrival in enumerate(arrivals, 1):
        for node in nodes:
            node.run(arrival.at, report)
            _hear(node, index, arrival.at - setup.delay)
        _route(id, arrival, nodes, index, route, report, setup)
    for node in nodes:
        node.run(math.inf, report)
    report.busy = [node.busy for node in nodes]
    report.makespan = max(node.world.clock.now() for node in nodes)
    return report


def _hear(node: _Node, index: HolderIndex, until: float) -> None:
    while node.told and node.told[0][0] <= until:
        _, said = node.told.popleft()
        if isinstance(said, BlockNews):
            index.change(node.replica.number, said.added, said.removed)
        else:
            node.replica.take(said)


def _route(
    id: int,
    arrival: TraceArrival,
    nodes: Sequence[_Node],
    index: HolderIndex,
    route: Route,
    report: FleetReport,
    setup: FleetSetup,
) -> None:
    submit = Submit(id, _tokens(arrival, setup.block_size), SamplingParams(max_tokens=arrival.num_output))
    replicas = [node.replica for node in nodes]
    new = new_tokens(submit, replicas, index)
    chosen, num_new = route.choose(submit, replicas, index)
    node = nodes[chosen.number]
    report.num_requests += 1
    report.num_prompt += arrival.num_prompt
    if min(new) <= arrival.num_prompt - setup.block_size:
        report.num_repeated += 1
        report.num_reached += new[chosen.number] <= arrival.num_prompt - setup.block_size
    engine, clock = node.world.engine, node.world.clock
    if not engine.has_work:
        clock.advance(max(0.0, arrival.at - clock.now()))
        if not any(each.told for each in nodes):
            report.num_quiet += 1
            node.expected[id] = arrival.num_prompt - new[chosen.number]
    chosen.sent(id, num_new)
    node.arrived[id] = arrival.at
    engine.add(submit)
    node.listen()


def _tokens(arrival: TraceArrival, block_size: int) -> list[int]:
    tokens: list[int] = []
    for block in arrival.blocks:
        tokens += [block] * min(block_size, arrival.num_prompt - len(tokens))
    return tokens


def read_trace(path: Path, speed: float = 1.0, most: int | None = None) -> Iterator[TraceArrival]:
    """A trace of lines with timestamp in ms, input_length, output_length and hash_ids of 512-token blocks."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if most is not None and number > most:
                return
            try:
                entry = json.loads(line)
                blocks, num_prompt = [int(block) for block in entry["hash_ids"]], int(entry["input_length"])
                at, num_output = float(entry["timestamp"]) / 1e3 / speed, int(entry["output_length"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number} is no request of a trace: {error!r}") from error
            if num_prompt < 1 or num_output < 1 or not blocks:
                raise ConfigError(f"{path}, line {number} has no prompt or no answer")
            yield TraceArrival(at, blocks, num_prompt, num_output)


def made_up(
    count: int, rate: float, seed: int, *, num_prefixes: int = 0, skew: float = 1.1, num_prompt: int = 4096
) -> list[TraceArrival]:
    """Poisson arrivals. Half of a prompt is one of `num_prefixes`, the popular ones by a power law; with 0, unique."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** skew for rank in range(num_prefixes)]
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        blocks = [_UNIQUE + 64 * number + at for at in range(num_prompt // 512)]
        if num_prefixes:
            prefix = rng.choices(range(num_prefixes), weights)[0]
            half = len(blocks) // 2
            blocks[:half] = [prefix * 64 + at for at in range(half)]
        arrivals.append(TraceArrival(now, blocks, num_prompt, rng.randint(50, 350)))
    return arrivals


def run(
    *,
    trace: Path | None = None,
    replicas: int = 8,
    routes: Sequence[str] = ROUTES,
    blocks: int = 1_000,
    speed: float = 1.0,
    requests: int | None = None,
    seed: int = 0,
    as_json: bool = False,
) -> int:
    """Print a row for each case and route."""
    if replicas < 1 or blocks < 32 or not 0 < speed < 1e6:
        got = f"replicas {replicas}, blocks {blocks}, speed {speed:g}"
        raise ConfigError(f"{got}; allowed: 1 or more, 32 or more, above 0")
    setup = FleetSetup(num_replicas=replicas, num_blocks=blocks)
    cases: dict[str, list[TraceArrival]] = {}
    if trace is not None:
        try:
            cases["trace"] = list(read_trace(trace, speed, requests))
        except OSError as error:
            raise ConfigError(f"the trace {trace} cannot be read: {error}") from error
    else:
        count, rate = requests or 3_000, 5.0 * replicas
        cases["skewed prefixes"] = made_up(count, rate, seed, num_prefixes=64)
        cases["unique prompts"] = made_up(count, rate, seed)
        cases["quiet"] = made_up(300, 0.3, seed, num_prefixes=16)
    rows: list[dict[str, object]] = []
    for case, arrivals in cases.items():
        for name in routes:
            row = {"case": case, **simulate_fleet(arrivals, setup, load_route(name)).row(name)}
            rows.append(row)
            if not as_json:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if as_json:
        print(json.dumps({"replicas": replicas, "rows": rows}))
    return 0
