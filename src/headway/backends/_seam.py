"""The backend seam: what `build` knows of the machinery that computes, and no more.

A backend is a file of this package, or `my.module:Thing` from outside, whose PLUGIN loads the model that a
configuration names and returns a `LoadedModel`. That makes executors; the scheduler, the engine and the server are the
same over every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headway.config import EngineConfig
from headway.engine.executor import Executor
from headway.modelfile.source import ModelSource
from headway.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ComputeInfo:
    """What the numbers depend on; the fields are those of `EngineInfo`."""

    dtype: str
    kv_dtype: str
    kernels: str
    kernels_fallback: str = ""
    kernels_digest: str = ""


class LoadedModel(Protocol):
    """A model in the memory of its backend, ready to be put behind any number of engines."""

    @property
    def source(self) -> ModelSource:
        """The files it was read from."""

    @property
    def spec(self) -> ModelSpec:
        """Its sizes."""

    def with_defaults(self, config: EngineConfig) -> EngineConfig:
        """The configuration with this backend's slots and step tokens where it gives none."""

    def make(self, config: EngineConfig, max_len: int) -> Executor:
        """An executor with KV memory of its own, for requests of up to `max_len` tokens.

        How many blocks and rows it has, its `capacity` says.
        """

    def compute_info(self, config: EngineConfig) -> ComputeInfo:
        """Which numbers an executor that `make` gives computes with."""


class Backend(Protocol):
    """A backend file's PLUGIN."""

    def __call__(self, config: EngineConfig) -> LoadedModel:
        """Load the model that the configuration names; ConfigError if it cannot run here."""
