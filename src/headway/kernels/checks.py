"""What the native kernels ask of a tensor before they are given its address: dtype, shape, strides, host memory.

Past these checks the kernels trust what they are given, except for the indices inside tensors, which they check
themselves. Knows no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import EngineError


def expect(fits: bool, kernel: str, name: str, got: Tensor, wanted: str) -> None:
    if not fits:
        what = f"{got.dtype} {list(got.shape)} with strides {list(got.stride())} on {got.device}"
        raise EngineError(f"kernel {kernel}: {name} is {what}; needed is {wanted} in host memory")


def in_range(status: int, kernel: str, fault: str) -> None:
    if status:
        raise EngineError(f"kernel {kernel}: {fault}")


def is_flat(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.is_contiguous() and t.is_cpu


def is_rows(t: Tensor) -> bool:
    """Float rows that are contiguous one by one, at any distance."""
    return t.dtype == torch.float32 and t.dim() == 2 and (t.stride(1) == 1 or t.shape[1] == 1) and t.is_cpu


def is_heads(t: Tensor) -> bool:
    """[T, heads, D] whose last two axes are contiguous: perhaps a view into a fused row."""
    if t.dtype != torch.float32 or t.dim() != 3 or not t.is_cpu:
        return False
    return (t.stride(2) == 1 or t.shape[2] == 1) and (t.stride(1) == t.shape[2] or t.shape[1] == 1)


def is_index(t: Tensor, dtype: torch.dtype, length: int | None = None) -> bool:
    return t.dtype == dtype and t.dim() == 1 and t.is_contiguous() and t.is_cpu and length in (None, t.shape[0])


def as_rows(x: Tensor) -> tuple[int, int, int]:
    """x [..., n] as (outer, inner, stride of outer): outer rows at any distance, each of `inner` adjacent rows of n."""
    n = x.shape[-1]
    if is_flat(x):
        return x.numel() // n, 1, n
    if x.dim() == 2:
        expect(is_rows(x), "rms_norm", "x", x, "float32 [T, n] with contiguous rows")
        return x.shape[0], 1, x.stride(0)
    expect(is_heads(x), "rms_norm", "x", x, "float32 [T, heads, n] with contiguous heads")
    return x.shape[0], x.shape[1], x.stride(0)
