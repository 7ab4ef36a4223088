"""A CUDA device as a backend: what it is, how much memory it has, and how kernels are launched on it.

Importing this file needs neither a device nor Triton; `open_device` does.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from headway.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Number formats of weights and KV."""


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
