"""A backend whose steps take a fixed time and compute nothing: `--device paced:PLUGIN`, for tests of the server's load.

Scheduler, ledger, prefix cache, processes and HTTP are the real ones. Only the device is not, so that its capacity is
known and does not depend on what else the machine does. Every token is the same; answers end at their `max_tokens`.

    seconds of a step = PACED_BASE_MS + PACED_ROW_MS * decoding rows + PACED_TOKEN_MS * prompt tokens
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, replace

from headway.backends._seam import Backend, ComputeInfo
from headway.config import EngineConfig
from headway.engine.executor import Capacity, Executor
from headway.engine.null import NullExecutor
from headway.modelfile.source import ModelSource, open_model
from headway.models.registry import read_config
from headway.models.spec import ModelSpec
from headway.values.plan import StepPlan, StepResult

TOKEN = 65  # a letter in a vocabulary of bytes


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds."""

    base: float = 0.004
    row: float = 0.0002
    token: float = 0.00005

    @staticmethod
    def of_environment() -> Pace:
        names = ("PACED_BASE_MS", "PACED_ROW_MS", "PACED_TOKEN_MS")
        return Pace(*(float(os.environ.get(name, 1e3 * value)) / 1e3 for name, value in zip(names, PACE, strict=True)))


PACE = (Pace().base, Pace().row, Pace().token)


class PacedExecutor(NullExecutor):
    """A step ends when its time is over."""

    def __init__(self, capacity: Capacity, pace: Pace) -> None:
        super().__init__(capacity, token=TOKEN)
        self._pace = pace
        self._seconds: deque[float] = deque()

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        pace, work = self._pace, plan.work
        self._seconds.append(pace.base + pace.row * work.decode + pace.token * work.tokens)

    def collect(self) -> StepResult:
        begun = time.monotonic()
        time.sleep(self._seconds.popleft())
        return replace(super().collect(), elapsed=time.monotonic() - begun)


@dataclass(frozen=True, slots=True)
class LoadedPaced:
    """A model of sizes and a tokenizer."""

    source: ModelSource
    spec: ModelSpec

    def with_defaults(self, config: EngineConfig) -> EngineConfig:
        return config

    def make(self, config: EngineConfig, max_len: int) -> Executor:
        num_blocks = config.cache.num_blocks or 100_000
        capacity = Capacity(num_blocks, config.cache.block_size, config.scheduler.num_slots)
        return PacedExecutor(capacity, Pace.of_environment())

    def compute_info(self, config: EngineConfig) -> ComputeInfo:
        return ComputeInfo("none", "none", "paced")


def load_model(config: EngineConfig) -> LoadedPaced:
    source = open_model(config.model)
    return LoadedPaced(source, read_config(source.config))


PLUGIN: Backend = load_model
