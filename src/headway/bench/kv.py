"""The share of allocated KV memory that holds no token, by block size: internal fragmentation of paging.

waste = (allocated tokens - computed tokens) / allocated tokens, summed over the steps of a run. The production
scheduler and ledger run a closed load of requests with random lengths over the null executor; prefix caching is
off, since shared blocks would count twice. Only a request's last block can be partly empty, on average by half a
block, so the waste is about block size / (2 x mean length).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.values.limits import Limits
from headway.values.params import SamplingParams

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = 16
MEAN_LENGTH = 25 * DEFAULT_BLOCK_SIZE
ROWS = 32


@dataclass(frozen=True, slots=True)
class WasteRow:
    block_size: int
    mean_length: float  # tokens of a request while it runs, averaged over steps
    waste: float
    bound: float  # half a block per request
    table_bytes: float  # block table entries of four bytes, per request


def measure(block_size: int, requests: int = 400, seed: int = 0) -> WasteRow:
    """Run a load with the default block size's mean length and add up allocated and computed tokens."""
    rng = random.Random(seed)
    num_blocks = ROWS * 4 * MEAN_LENGTH // block_size
    ledger = KVLedger(num_blocks, block_size, caching=False)
    scheduler = Scheduler(ledger, Limits(ROWS, 4 * MEAN_LENGTH), Policy())
    executor = NullExecutor(Capacity(num_blocks, block_size, ROWS))
    for id in range(requests):
        prompt = rng.randint(MEAN_LENGTH // 2, MEAN_LENGTH * 5 // 4)
        params = SamplingParams(max_tokens=rng.randint(MEAN_LENGTH // 8, MEAN_LENGTH // 2))
        scheduler.add(Request(id, [0] * prompt, params, arrival=float(id)))
    handed_out = used = lengths = blocks = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        executor.submit(plan)
        scheduler.commit(plan, executor.collect())
        running = scheduler.state.rows.running()
        handed_out += (num_blocks - ledger.num_free) * block_size
        used += sum(scheduler.state.rows.num_computed(req) for req in running)
        blocks += sum(len(req.table) for req in running)
        lengths += len(running)
    mean_length = used / lengths
    return WasteRow(
        block_size=block_size,
        mean_length=round(mean_length, 1),
        waste=round((handed_out - used) / handed_out, 4),
        bound=round((block_size / 2) / (mean_length + block_size / 2), 4),
        table_bytes=round(4 * blocks / lengths, 1),
    )


def measure_all() -> Iterator[WasteRow]:
    for block_size in BLOCK_SIZES:
        yield measure(block_size)


def run(as_json: bool = False) -> int:
    """Print the sweep; with `as_json` the last line is one object with all rows."""
    rows = []
    print(f"{'block size':>10} {'mean length':>12} {'waste':>8} {'expected':>9} {'table bytes':>12}")
    for row in measure_all():
        rows.append(row)
        print(
            f"{row.block_size:10} {row.mean_length:12.1f} {row.waste:8.2%} {row.bound:9.2%} {row.table_bytes:12.1f}",
            flush=True,
        )
    if as_json:
        sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n")
    return 0
