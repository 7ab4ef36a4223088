"""A backend that computes nothing: what `device = "null_backend:PLUGIN"` names in the tests of the seam. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from headway.backends._seam import Backend, ComputeInfo
from headway.config import EngineConfig
from headway.engine.executor import Capacity, Executor
from headway.engine.null import NullExecutor
from headway.models.spec import ModelSpec

SLOTS = 3
TOKEN = 5
NUM_BLOCKS, HOST_BLOCKS = 40, 2
STEP_SIZES = (8, 24, 64)


@dataclass(frozen=True, slots=True)
class LoadedNull:
    """A model of sizes alone."""

    source: Any
    spec: ModelSpec

    def with_defaults(self, config: EngineConfig) -> EngineConfig:
        wanted = config.scheduler
        return replace(config, scheduler=replace(wanted, max_num_seqs=wanted.max_num_seqs or SLOTS))

    def make(self, config: EngineConfig, max_len: int) -> Executor:
        rows = config.scheduler.num_slots
        capacity = Capacity(NUM_BLOCKS, config.cache.block_size, rows, HOST_BLOCKS, STEP_SIZES)
        return NullExecutor(capacity, token=TOKEN)

    def compute_info(self, config: EngineConfig) -> ComputeInfo:
        return ComputeInfo("none", "none", "null", kernels_fallback="there is nothing to compute")


def load_model(config: EngineConfig) -> LoadedNull:
    source = SimpleNamespace(name=config.model.model, digest="null", eos_ids=(2,), config={}, sampling={})
    spec = ModelSpec("llama", 100, 8, 8, 1, 1, 1, 8, norm_eps=1e-5, rope_theta=1e4, max_len=64)
    return LoadedNull(source, spec)


PLUGIN: Backend = load_model
