"""`headway simulate`: reads what is asked for, runs it once for each route, prints a table or JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headway.bench.console import print_json, print_table, progress
from headway.bench.fleet.arrivals import BLOCK, MadeUp, TraceArrival, read_trace
from headway.bench.fleet.report import FleetReport
from headway.bench.fleet.scale import ScaleSetup
from headway.bench.fleet.simulation import FleetSetup, ReplicaLoss, simulate_fleet
from headway.cluster.scaling import ScaleRule
from headway.errors import ConfigError
from headway.values.params import NO_SLO, Slo

WORKLOADS = ("shared-prefix", "unique")
MOST_REPLICAS = 4096
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_SLO_NAMES = {"ttft": "ttft", "tpot": "itl", "e2e": "deadline"}


def run(
    setup: FleetSetup,
    *,
    routes: Sequence[str],
    load: Path | MadeUp,
    speed: float = 1.0,
    requests: int | None = None,
    slo: str = "",
    as_json: bool = False,
) -> int:
    """Print a column for each route; equal arguments print equal bytes."""
    objective = parse_slo(slo)
    check(setup)
    arrivals = list(load.arrivals() if isinstance(load, MadeUp) else read_trace(load, speed, requests))
    if not arrivals:
        raise ConfigError(f"there are no requests in {load}")
    check_lengths(arrivals, setup)
    reports: dict[str, FleetReport] = {}
    for name in routes:
        with progress(name, len(arrivals)) as told:
            reports[name] = simulate_fleet(arrivals, replace(setup, route=name), told=told)
    rows = [{"route": name, **report.row(objective)} for name, report in reports.items()]
    if as_json:
        timelines = {name: [each._asdict() for each in report.moments()] for name, report in reports.items()}
        print_json({"setup": asdict(setup), "rows": rows, "timelines": timelines})
        return 0
    names = list(dict.fromkeys(name for row in rows for name in row if name != "route"))
    print_table(["", *routes], [[name, *(str(row.get(name, "")) for row in rows)] for name in names])
    for name, report in reports.items():
        moments = [[str(round(value, 2)) for value in each] for each in report.moments()]
        if moments:
            print_table(["seconds", "ready", "starting", "open requests", "predicted wait"], moments, title=name)
    return 0


def check(setup: FleetSetup) -> None:
    """ConfigError: a number is out of its range."""
    node, most = setup.node, MOST_REPLICAS
    for name, value, low, high in (
        ("replicas", setup.num_replicas, 1, most),
        ("blocks", node.num_blocks, 32, 1 << 20),
        ("cell-size", setup.cell_size, 1, 1024),
        ("cell-blocks", setup.cell_blocks, 1, 64),
        ("spill", setup.spill, 0, 100),
        ("delay-ms", node.delay * 1e3, 0, 60_000),
        ("start-s", setup.start_s, 0, 86_400),
        ("link-gbps", node.link_gbps, 0, 1e5),
        ("tier-gb", node.tier_gb, 0, 1e6),
        ("tier-gbps", node.tier_gbps, 0.001, 1e5),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value:g}; allowed: {low} to {high:g}")
    scale = setup.scale
    if scale is not None and not scale.least <= setup.num_replicas <= min(scale.most, most):
        raise ConfigError(f"replicas is {setup.num_replicas}, outside of scale {scale.least}:{scale.most}")


def check_lengths(arrivals: Sequence[TraceArrival], setup: FleetSetup) -> None:
    """ConfigError: a request can never fit into the cache of an engine."""
    longest = max(each.num_prompt + each.num_output for each in arrivals)
    if longest > setup.node.num_blocks * BLOCK:
        raise ConfigError(
            f"blocks is {setup.node.num_blocks}, {setup.node.num_blocks * BLOCK} tokens, and the longest request has "
            f"{longest}; allowed: {-(-longest // BLOCK)} or more"
        )


def parse_slo(text: str) -> Slo:
    """ttft=2s,tpot=100ms,e2e=30s, any of them."""
    if not text:
        return NO_SLO
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match = _SECONDS.fullmatch(value)
        if name not in _SLO_NAMES or match is None or float(match[1]) == 0:
            raise ConfigError(f"slo has {part.strip()!r}; allowed: ttft=2s, tpot=100ms, e2e=30s, with commas between")
        found[_SLO_NAMES[name]] = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)
    return Slo(**found)


def parse_loss(text: str, num_replicas: int) -> ReplicaLoss:
    """60:3 for three processes after a minute; 60:10% for the machines of a tenth of the replicas."""
    at, _, what = text.partition(":")
    is_machine, number = what.endswith("%"), what.removesuffix("%")
    try:
        seconds, value = float(at), float(number)
        count = round(value / 100 * num_replicas) if is_machine else int(number)
    except ValueError:
        seconds, value, count = -1.0, 0.0, 0
    if not (0 <= seconds < 1e9 and 1 <= count <= num_replicas):
        raise ConfigError(
            f"fail is {text!r}; allowed: SECONDS:NUMBER of processes, or SECONDS:SHARE% of the machines, at least one "
            f"replica and at most {num_replicas}"
        )
    return ReplicaLoss(seconds, count, is_machine)


def parse_scale(text: str, per_replica: float, wait_s: float, up_s: float, down_s: float) -> ScaleSetup | None:
    """2:16, the fewest and the most replicas; empty: no autoscaler."""
    if not text:
        return None
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal()):
        raise ConfigError(f"scale is {text!r}; allowed: FEWEST:MOST replicas, as in 2:16")
    return ScaleSetup(int(least), int(most), ScaleRule(per_replica, wait_s), up_s, down_s)
