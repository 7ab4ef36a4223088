"""Options shared by the benches of a whole model: which model, in which number formats, on how many threads.

Turns these options into an `EngineConfig` and into the fields of a result; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.backends.cpu import LoadedCpu
from headway.bench.workload import WorkItem
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.errors import ConfigError
from headway.kernels.formats import resolve_kv_dtype
from headway.values.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Choices that are not made (None) are left to the configuration's own defaults."""

    model: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    kernels: str | None = None
    threads: int | None = None
    cache_dir: str | None = None
    model_family: str | None = None

    def chosen(self) -> dict[str, Any]:
        """The choices that were made, by field of the configuration."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def flags(self) -> list[str]:
        """The same choices for a command line."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.chosen().items()]

    def config(self, **more: Any) -> EngineConfig:
        return EngineConfig.of(**self.chosen(), **more)


def describe(loaded: LoadedCpu, config: EngineConfig) -> dict[str, object]:
    """What a result says about the model that ran, every `auto` resolved."""
    device = loaded.device
    formats = {"dtype": device.dtype, "kv_dtype": resolve_kv_dtype(config.cache.kv_dtype, device.dtype)}
    return {"model": loaded.source.name, "kernels": device.kernels.name, "threads": device.threads} | formats


def pool_blocks(works: Sequence[WorkItem], slots: int, block_size: int) -> int:
    """Blocks with which the `slots` largest requests fit at once, and the scheduler's own reserve: no preemption."""
    needed = sorted((-(-(len(work.tokens) + work.max_tokens) // block_size) for work in works), reverse=True)
    return sum(needed[:slots]) * 102 // 100 + 4


def submit_of(id: int, work: WorkItem) -> Submit:
    """Greedy, and exactly as long as the work says."""
    return Submit(id, work.tokens, SamplingParams(max_tokens=work.max_tokens, temperature=0, ignore_eos=True))


def at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; allowed: 1 or more")
