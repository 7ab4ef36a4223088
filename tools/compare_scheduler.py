"""Compare the scheduler of two source trees: tools/compare_scheduler.py OLD/src NEW/src --rounds 5

Runs the case `steady` of `headway bench scheduler` of each tree in processes of their own, the trees taking turns for
each policy and round, so that other load of the machine falls on both. A ratio is new over old, the median of all
rounds. The status is 1 if a policy is slower by more than `--most`, by the median of its configurations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# The child prints one JSON list of [running, queue, median us] rows. Thread CPU time replaces the timer before
# the bench is imported, since `measure` of older trees takes none: other processes then disturb it less.
CHILD = """
import json, sys, time
time.perf_counter = time.thread_time
from headway.bench.scheduler import measure
policy, running, queues, steps = json.loads(sys.argv[1])
found = [measure(policy, rows, queue, steps) for rows in running for queue in queues]
print(json.dumps([[row.running, row.queue, row.us_per_step] for row in found]))
"""
POLICIES = ("fcfs", "sjf", "ltr", "srpt", "hrrn", "lpm", "priority", "edf", "slo", "fair", "mlfq", "lanes")


class Configuration(NamedTuple):
    """One configuration of the bench."""

    policy: str
    running: int
    queue: int


Found = dict[Configuration, float]


def measure(src: Path, policy: str, running: Sequence[int], queues: Sequence[int], steps: int) -> Found:
    """Median microseconds per step of each configuration of a policy, by the tree under `src`."""
    environment = {**os.environ, "PYTHONPATH": str(src.resolve())}
    asked = json.dumps([policy, list(running), list(queues), steps])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, asked], env=environment, check=True, capture_output=True, text=True
    )
    return {Configuration(policy, *where): us for *where, us in json.loads(done.stdout.splitlines()[-1])}


def ratios(old: Sequence[Found], new: Sequence[Found]) -> Found:
    """New over old of each configuration: the median of the rounds' ratios."""
    return {
        setup: statistics.median(after[setup] / before[setup] for before, after in zip(old, new, strict=True))
        for setup in old[0]
    }


def by_policy(found: Found) -> dict[str, float]:
    """The median over the configurations of each policy."""
    policies = dict.fromkeys(setup.policy for setup in found)
    return {
        policy: statistics.median(ratio for setup, ratio in found.items() if setup.policy == policy)
        for policy in policies
    }


def table(old: Sequence[Found], new: Sequence[Found]) -> Iterator[str]:
    yield f"{'policy':10} {'running':>8} {'queue':>8} {'old us':>9} {'new us':>9} {'ratio':>7}"
    for setup, ratio in ratios(old, new).items():
        before = statistics.median(each[setup] for each in old)
        after = statistics.median(each[setup] for each in new)
        yield f"{setup.policy:10} {setup.running:8} {setup.queue:8} {before:9.1f} {after:9.1f} {ratio:7.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the src folder of the old tree")
    parser.add_argument("new", type=Path, help="the src folder of the new tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each configuration")
    parser.add_argument("--policy", action="append", help="only this policy; may be given several times")
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--queue", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--most", type=float, default=1.03, help="the largest ratio of a policy that is no fault")
    args = parser.parse_args(arguments)
    old: list[Found] = []
    new: list[Found] = []
    for number in range(args.rounds):
        old.append({})
        new.append({})
        for policy in args.policy or POLICIES:
            turns = [(args.old, old[-1]), (args.new, new[-1])]
            for src, found in turns if number % 2 == 0 else reversed(turns):  # neither tree always goes second
                found.update(measure(src, policy, args.running, args.queue, args.steps))
        sys.stderr.write(f"round {number + 1} of {args.rounds} done\n")
    print("\n".join(table(old, new)))
    slower = 0
    for policy, ratio in by_policy(ratios(old, new)).items():
        slower += ratio > args.most
        print(f"{policy:10} {ratio:7.3f} {'SLOWER' if ratio > args.most else ''}".rstrip())
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
