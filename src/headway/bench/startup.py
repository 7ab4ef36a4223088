"""From the command to a server that is ready, in seconds: with an empty cache, and again with a full one.

Every round starts `headway serve` twice over a new cache folder. The first start converts the model; the second maps
what the first one left, as every later start does. The system's page cache is warm for both: files come from memory
if they were read before. Memory is that of all processes of the server when it is ready, before any request.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass, replace

from headway.bench.console import print_json, print_table, progress
from headway.bench.server import ServerProcess
from headway.bench.setup import ModelSetup, at_least_one


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server."""

    cache: str  # empty or warm
    ready_s: float
    rss_mb: float


def run(setup: ModelSetup, *, rounds: int = 3, as_json: bool = False) -> int:
    """Print the medians; with `as_json` the last line is one object. A cache folder in `setup` is not touched."""
    at_least_one(rounds=rounds)
    starts: list[Start] = []
    with progress("startup", 2 * rounds) as update:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
                flags = replace(setup, cache_dir=folder).flags()
                for cache in ("empty", "warm"):
                    with ServerProcess(flags) as server:
                        starts.append(Start(cache, round(server.ready_s, 3), round(server.resident_bytes() / 1e6, 1)))
                    update(len(starts))
    rows = []
    record: dict[str, object] = {"rounds": rounds} | setup.chosen()
    for cache in ("empty", "warm"):
        mine = [start for start in starts if start.cache == cache]
        seconds, memory = (
            statistics.median(values) for values in zip(*((s.ready_s, s.rss_mb) for s in mine), strict=True)
        )
        rows.append((cache, f"{seconds:.2f}", memory))
        record |= {f"{cache}_s": seconds, f"{cache}_rss_mb": memory}
    print_table(("cache", "s to ready", "MB resident"), rows, f"headway serve, median of {rounds}")
    if as_json:
        print_json(record | {"starts": [asdict(start) for start in starts]})
    return 0
