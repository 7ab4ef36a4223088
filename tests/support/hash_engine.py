"""The real engine over an executor whose every token depends on its whole prefix: for tests of the server."""

from __future__ import annotations

from dataclasses import replace

from hashing import HashExecutor
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.scheduler import Scheduler
from headway.engine.client import EngineInfo
from headway.engine.clock import MonotonicClock
from headway.engine.decisions import DecisionJournal
from headway.engine.engine import Engine
from headway.engine.metrics import EngineMetrics
from headway.values.limits import Limits
from headway.values.plan import StepResult

NUM_BLOCKS, BLOCK_SIZE = 96, 4


class Hashing(HashExecutor):
    def collect(self) -> StepResult:
        return replace(super().collect(), elapsed=1e-3)

    def close(self) -> None:
        pass


def hash_engine(depth: int) -> Engine:
    """Sixteen rows, few blocks, and a journal as every built engine has one."""
    clock = MonotonicClock()
    metrics = EngineMetrics(clock)
    limits = Limits(rows=16, tokens=64, chunk=16)
    scheduler = Scheduler(KVLedger(NUM_BLOCKS, BLOCK_SIZE), limits, Policy(), sink=metrics)
    metrics.journal = DecisionJournal(scheduler.state.costs)
    info = EngineInfo("hash", 200, 257, BLOCK_SIZE, NUM_BLOCKS, 16, ())
    return Engine(scheduler, Hashing(NUM_BLOCKS, BLOCK_SIZE), info, metrics, clock, depth=depth, max_waiting=1000)  # type: ignore[arg-type]
