"""`headway simulate`: a fleet of engines by a virtual clock. Owns the flags; the rest is in `headway.bench.fleet`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from headway.cli.args import Switch
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.fleet.arrivals import MadeUp
    from headway.bench.fleet.simulation import FleetSetup

EXAMPLES = """Examples:
  headway simulate --replicas 8 --route cost --route round_robin
  headway simulate --replicas 8 --trace conversations.jsonl --speed 2 --slo ttft=2s,tpot=100ms
  headway simulate --replicas 16 --fail 60:4 --fail 120:25% --requests 10000
  headway simulate --replicas 2 --scale 2:16 --shape diurnal --rate 30 --requests 40000 --json
  headway simulate --replicas 256 --cell-size 64 --spill 1.25 --prefixes 2000 --requests 20000"""


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """Made-up requests, if there is no trace."""

    workload: str = "shared-prefix"
    """shared-prefix: half of a prompt is one of --prefixes, popular by a power law; unique: no two share anything."""
    rate: float | None = None
    """Requests per second, the mean; 5 for each replica if not given."""
    prefixes: int = 64
    """How many there are."""
    prompt_tokens: int = 4096
    """Of each request."""
    shape: str = "steady"
    """steady, diurnal (a wave from a fifth to nine fifths of the rate) or bursty (four times as much, now and then)."""
    period_s: float = 600.0
    """Of the wave, or the mean time from burst to burst."""


@dataclass(frozen=True, slots=True)
class ReplicaFlags:
    """One replica and what lies between it and others."""

    blocks: int = 1_000
    """KV blocks of 512 tokens."""
    delay_ms: float = 5.0
    """Between an engine and its front, each way: what a route knows is so old."""
    start_s: float = 30.0
    """From the order of a replica to its first request."""
    link_gbps: float = 0.0
    """Of each replica, for KV that another one holds; 0: it is computed."""
    tier_gb: float = 0.0
    """Of each replica, for KV that left its cache; 0: none."""
    tier_gbps: float = 50.0
    """Reading from the tier."""


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Cells, losses, and how many replicas there are."""

    cell_size: int = 64
    """Most replicas with one front and one index."""
    cell_blocks: int = 1
    """Leading blocks of 512 tokens of a prompt that choose its cell."""
    spill: float = 1.25
    """Times the mean load of all cells, beyond which a cell gives requests to their second cell; 0: never."""
    fail: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """SECONDS:NUMBER of processes that end, or SECONDS:SHARE% of machines that go silent; several are possible."""
    scale: str = ""
    """FEWEST:MOST replicas of an autoscaler, which replaces what is lost too; without it what is lost is restarted."""
    per_replica: float = 32.0
    """Requests that run or wait at one replica, as the autoscaler wants it."""
    wait_s: float = 1.0
    """Predicted wait above which it adds replicas."""
    up_s: float = 2.0
    """For so long more have to be needed before they are ordered."""
    down_s: float = 60.0
    """For so long fewer have to be enough before some are removed."""


LOAD, SIZE, FLEET = LoadFlags(), ReplicaFlags(), FleetFlags()


def simulate(
    *,
    replicas: int = 1,
    route: list[str] | None = None,
    trace: Path | None = None,
    speed: float = 1.0,
    requests: int | None = None,
    seed: int = 0,
    slo: str = "",
    json: Switch = False,
    load: Annotated[LoadFlags, Parameter(name="*", group=Group("Made-up load", sort_key=3))] = LOAD,
    size: Annotated[ReplicaFlags, Parameter(name="*", group=Group("Each replica", sort_key=4))] = SIZE,
    fleet: Annotated[FleetFlags, Parameter(name="*", group=Group("Fleet", sort_key=5))] = FLEET,
) -> int:
    """Engines behind fronts by a virtual clock: cache hits, balance, TTFT, losses, cost. Equal arguments, equal bytes.

    Scheduler, cache, engine loop, routes, resumes and retries are those of service; steps take what a cost model of
    llama-3.1-8b on an H200 says.

    Parameters
    ----------
    replicas
        How many engines at the start.
    route
        A route, or my.module:Thing; several take turns. cost if not given.
    trace
        Requests to replay: .jsonl with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks, or
        .csv with TIMESTAMP, ContextTokens and GeneratedTokens.
    speed
        Of the trace: 2 replays it in half its time.
    requests
        How many at most; 1,000, or the whole trace, if not given.
    seed
        Of made-up requests and of which replicas fail.
    slo
        Report the share of requests that met this, as in ttft=2s,tpot=100ms.
    json
        Print one line of JSON.
    """
    from headway.bench.fleet.run import run  # imports the engine, which takes a moment

    made_up = _made_up(load, 1_000 if requests is None else requests, 5.0 * max(1, replicas), seed)
    setup = _setup(replicas, size, fleet, seed)
    routes, source = route or ("cost",), trace or made_up
    return run(setup, routes=routes, load=source, speed=speed, requests=requests, slo=slo, as_json=json)


def _made_up(load: LoadFlags, count: int, rate: float, seed: int) -> MadeUp:
    from headway.bench.fleet.arrivals import MadeUp
    from headway.bench.fleet.run import WORKLOADS

    if load.workload not in WORKLOADS:
        raise ConfigError(f"workload is {load.workload!r}; allowed: {', '.join(WORKLOADS)}")
    return MadeUp(
        count,
        rate if load.rate is None else load.rate,
        seed,
        num_prefixes=load.prefixes if load.workload == "shared-prefix" else 0,
        num_prompt=load.prompt_tokens,
        shape=load.shape,
        period_s=load.period_s,
    )


def _setup(replicas: int, size: ReplicaFlags, fleet: FleetFlags, seed: int) -> FleetSetup:
    from headway.bench.fleet.node import NodeSetup
    from headway.bench.fleet.run import parse_loss, parse_scale
    from headway.bench.fleet.simulation import FleetSetup

    node = NodeSetup(
        num_blocks=size.blocks,
        delay=size.delay_ms / 1e3,
        link_gbps=size.link_gbps,
        tier_gb=size.tier_gb,
        tier_gbps=size.tier_gbps,
    )
    return FleetSetup(
        replicas,
        node,
        cell_size=fleet.cell_size,
        cell_blocks=fleet.cell_blocks,
        spill=fleet.spill,
        start_s=size.start_s,
        losses=[parse_loss(each, replicas) for each in fleet.fail],
        scale=parse_scale(fleet.scale, fleet.per_replica, fleet.wait_s, fleet.up_s, fleet.down_s),
        seed=seed,
    )
