"""`headway bench`: benchmarks that need no server. Owns their flags; the measuring is in `headway.bench`."""

from __future__ import annotations

from cyclopts import App

from headway.cli.args import Switch

EXAMPLES = """Examples:
  headway bench scheduler --json
  headway bench kv
  headway bench depth --requests 32"""
SCHEDULER_EXAMPLES = """Examples:
  headway bench scheduler
  headway bench scheduler --json | tail -1"""
KV_EXAMPLES = """Examples:
  headway bench kv
  headway bench kv --json | tail -1"""

DEPTH_EXAMPLES = """Examples:
  headway bench depth
  headway bench depth --requests 64 --rounds 5 --json | tail -1"""


def create_app() -> App:
    app = App(name="bench", help="Measure parts of the engine on this machine.", help_epilogue=EXAMPLES, sort_key=6)
    app.command(scheduler, help_epilogue=SCHEDULER_EXAMPLES)
    app.command(kv, help_epilogue=KV_EXAMPLES)
    app.command(depth, help_epilogue=DEPTH_EXAMPLES)
    return app


def scheduler(*, json: Switch = False) -> int:
    """Cost of schedule() and commit() per step, over running rows, queue depths and policies.

    Parameters
    ----------
    json
        End with one line of JSON that holds every row.
    """
    from headway.bench.scheduler import run  # benchmarks are not needed to print help

    return run(as_json=json)


def kv(*, json: Switch = False) -> int:
    """Waste of the paged KV cache, swept over block sizes.

    Parameters
    ----------
    json
        End with one line of JSON that holds every row.
    """
    from headway.bench.kv import run  # benchmarks are not needed to print help

    return run(as_json=json)


def depth(*, requests: int = 32, rounds: int = 3, seed: int = 0, json: Switch = False) -> int:
    """Throughput of the embedded model at overlap depth 1 and 2, interleaved.

    Parameters
    ----------
    requests
        Requests of each run, all there at the start.
    rounds
        Runs of each depth; the median counts.
    seed
        Of the workload: equal seeds, equal lengths.
    json
        End with one line of JSON that holds the medians.
    """
    from headway.bench.depth import run  # imports torch, which takes a second

    return run(as_json=json, requests=requests, rounds=rounds, seed=seed)
