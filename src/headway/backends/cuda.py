"""A CUDA device as a backend: what it is, how much memory it has, and how kernels are launched on it.

Importing this file needs neither a device nor Triton; `open_device` does.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch

from headway.config import CacheConfig
from headway.errors import ConfigError

DEFAULT_SLOTS = 512
DEFAULT_STEP_TOKENS = 4096
POOL_SHARE = 0.92  # of the device memory that weights and working memory leave: libraries take some later
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""Number formats of weights and KV. With fp8 weights, layers compute in e4m3 and everything else in bfloat16."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device that this process can compute on."""

    name: str
    device: torch.device
    num_sms: int
    has_dependent_launch: bool  # a kernel may start before its predecessor has ended, and wait for it itself
    total_bytes: int

    def free_bytes(self) -> int:
        """Device memory that could be taken now."""
        return int(torch.cuda.mem_get_info(self.device)[0])


def resolve_dtype(dtype: str, kv_dtype: str) -> str:
    """The number format of weights and KV cells, which is one here; ConfigError if this device has none such."""
    chosen = "bfloat16" if dtype == "auto" else dtype
    if chosen not in DTYPES or kv_dtype not in ("auto", chosen):
        raise ConfigError(
            f"dtype is {dtype!r} and kv_dtype is {kv_dtype!r}; on a CUDA device allowed are auto, "
            f"{', '.join(DTYPES)}, the same for both"
        )
    return chosen


def with_pool(cache: CacheConfig, free_bytes: int) -> CacheConfig:
    """The KV pool as configured, or most of the memory that is free."""
    if cache.num_blocks is not None or cache.kv_memory_gb is not None:
        return cache
    return replace(cache, kv_memory_gb=max(free_bytes, 1) * POOL_SHARE / 2**30)


def missing() -> str | None:
    """Why there is no device to compute on; None if there is one."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def open_device(index: int = 0) -> CudaDevice:
    """The device of that index; ConfigError if it cannot be used."""
    reason = missing()
    if reason is not None:
        raise ConfigError(f"device is 'cuda', but {reason}; allowed here: cpu")
    facts = torch.cuda.get_device_properties(index)
    return CudaDevice(
        name=facts.name,
        device=torch.device("cuda", index),
        num_sms=facts.multi_processor_count,
        has_dependent_launch=facts.major >= 9,
        total_bytes=facts.total_memory,
    )
