"""`Backend`: where a model runs and with what, chosen once when the engine is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway.kernels.ops import KernelSet


@dataclass(frozen=True, slots=True)
class Backend:
    """A value: two engines on equal backends compute equal bits."""

    name: str
    device: torch.device
    dtype: str
    """Number format of the weights, resolved: float32, bfloat16, int8 or q4."""
    kernels: KernelSet
    threads: int
    free_bytes: Callable[[], int]
    """Memory that is free now, without pushing other processes out."""
