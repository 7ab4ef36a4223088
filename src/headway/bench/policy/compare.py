"""Chosen policies on the same requests, by the virtual clock: numbers beside each other, and no claims.

Conversations of two classes, half of which want their first token within two seconds and half within thirty; lengths
are predicted as badly as a small model predicts them. A policy of your own is named as my.module:Thing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from headway import plugins
from headway.bench.console import print_json, print_table, progress
from headway.bench.policy import reference, workloads
from headway.bench.policy.starvation import SIGMA
from headway.bench.virtual import BenchRun, Job, simulate
from headway.errors import ConfigError

SECONDS = 240.0
TARGET_S = 0.19  # of ITL; both classes ask for 0.2 on average
BASELINE = "fcfs"
CASES: Mapping[str, Callable[[random.Random], list[Job]]] = {
    "steady": lambda rng: reference.two_classes(rng, 0.9, SECONDS, sigma=SIGMA),
    "overload": lambda rng: reference.two_classes(rng, 1.5, SECONDS, sigma=SIGMA),
    "bursts": lambda rng: reference.two_classes(rng, 0.9, SECONDS, partial(workloads.gamma, spread=4.0), sigma=SIGMA),
}


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What one policy made of one case; times in seconds, of requests that were answered."""

    case: str
    policy: str
    requests: int
    answered: float  # share
    objectives_met: float  # share
    ttft_mean: float
    ttft_p99: float
    e2e_mean: float
    e2e_p99: float
    preemptions: int


def run(policies: Sequence[str], cases: Sequence[str] = (), *, seed: int = 0, as_json: bool = False) -> int:
    """A table per case, with `fcfs` beside the policies that were named; with `as_json` the last line has all rows."""
    for name in cases:
        if name not in CASES:
            raise ConfigError(f"there is no case {name!r} for --policy; there are: {', '.join(CASES)}")
    named = list(dict.fromkeys([BASELINE, *policies]))
    for name in named:
        plugins.load("policies", name)
    rows: list[PolicyRow] = []
    chosen = list(cases or CASES)
    with progress("policies", len(chosen) * len(named)) as update:
        for case in chosen:
            for row in measure(case, named, seed):
                rows.append(row)
                update(len(rows))
    for case in chosen:
        _print(case, [row for row in rows if row.case == case])
    if as_json:
        print_json({"seed": seed, "clock": "virtual", "rows": [asdict(row) for row in rows]})
    return 0


def measure(case: str, policies: Sequence[str], seed: int) -> Iterator[PolicyRow]:
    """Every policy serves the same requests."""
    for name in policies:
        jobs = CASES[case](random.Random(seed))
        setup = replace(reference.engine(plugins.load("policies", name)), target=TARGET_S)
        yield _row(case, name, simulate(jobs, setup))


def _row(case: str, policy: str, run_: BenchRun) -> PolicyRow:
    records, count = run_.records, len(run_.records)
    answered = [record for record in records if record.is_answered]
    ttft, e2e = [record.ttft for record in answered], [record.total for record in answered]
    return PolicyRow(
        case=case,
        policy=policy,
        requests=count,
        answered=round(len(answered) / count, 4),
        objectives_met=round(sum(record.is_met for record in records) / count, 4),
        ttft_mean=round(workloads.mean(ttft), 3),
        ttft_p99=round(workloads.quantile(ttft, 0.99), 3),
        e2e_mean=round(workloads.mean(e2e), 3),
        e2e_p99=round(workloads.quantile(e2e, 0.99), 3),
        preemptions=run_.preemptions,
    )


def _print(case: str, rows: Sequence[PolicyRow]) -> None:
    columns = ("met", "TTFT mean", "TTFT P99", "E2E mean", "E2E P99", "answered", "preempted")
    cells = [
        (
            *(row.policy, f"{row.objectives_met:.1%}", row.ttft_mean, row.ttft_p99, row.e2e_mean, row.e2e_p99),
            *(f"{row.answered:.1%}", row.preemptions),
        )
        for row in rows
    ]
    print_table(("", *columns), cells, f"{case}: {rows[0].requests} requests; objectives met, virtual seconds")
