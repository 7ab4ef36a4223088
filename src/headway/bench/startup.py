"""From the command to a server that is ready, in seconds: with an empty cache, and again with a full one.

Every round starts `headway serve` twice over a new cache folder. The first start converts the model; the second maps
what the first one left, as every later start does. The system's page cache is warm for both: files come from memory
if they were read before. Memory is that of all processes of the server when it is ready, before any request: resident
memory counts a shared page once per process, proportional memory (PSS) once in all.
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
    pss_mb: float


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
                        memory = (server.resident_bytes(), server.proportional_bytes())
                        starts.append(Start(cache, round(server.ready_s, 3), *(round(n / 1e6, 1) for n in memory)))
                    update(len(starts))
    rows = []
    record: dict[str, object] = {"rounds": rounds} | setup.chosen()
    for cache in ("empty", "warm"):
        mine = [start for start in starts if start.cache == cache]
        columns = zip(*((start.ready_s, start.rss_mb, start.pss_mb) for start in mine), strict=True)
        middle = [statistics.median(column) for column in columns]
        rows.append((cache, f"{middle[0]:.2f}", *middle[1:]))
        record |= dict(zip((f"{cache}_s", f"{cache}_rss_mb", f"{cache}_pss_mb"), middle, strict=True))
    print_table(("cache", "s to ready", "MB resident", "MB PSS"), rows, f"headway serve, median of {rounds}")
    if as_json:
        print_json(record | {"starts": [asdict(start) for start in starts]})
    return 0
