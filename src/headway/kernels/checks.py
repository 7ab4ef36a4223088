"""What the native kernels ask of an array before they are given its address: dtype, shape, strides.

Past these checks the kernels trust what they are given, except for the indices inside arrays, which they check
themselves. Knows no kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headway.errors import EngineError

Array = NDArray[Any]


def expect(fits: bool, kernel: str, name: str, got: Array, wanted: str) -> None:
    if not fits:
        what = f"{got.dtype} {list(got.shape)} with strides {list(got.strides)} in bytes"
        raise EngineError(f"kernel {kernel}: {name} is {what}; needed is {wanted}")


def in_range(status: int, kernel: str, fault: str) -> None:
    if status:
        raise EngineError(f"kernel {kernel}: {fault}")


def address(t: Array) -> int:
    """Where its first element lies; good as long as the array is."""
    return t.ctypes.data


def stride(t: Array) -> int:
    """Elements from one row to the next."""
    return t.strides[0] // t.itemsize


def is_flat(t: Array) -> bool:
    return t.dtype == np.float32 and t.flags.c_contiguous and t.flags.aligned


def is_rows(t: Array) -> bool:
    """Float rows that are contiguous one by one, at any distance."""
    return _is_floats(t, 2) and (t.strides[1] == 4 or t.shape[1] == 1 or t.size == 0)


def is_heads(t: Array) -> bool:
    """[T, heads, D] whose last two axes are contiguous: perhaps a view into a fused row."""
    if not _is_floats(t, 3):
        return False
    is_adjacent = (t.strides[2] == 4 or t.shape[2] == 1) and (t.strides[1] == 4 * t.shape[2] or t.shape[1] == 1)
    return is_adjacent or t.size == 0


def is_index(t: Array, dtype: DTypeLike, length: int | None = None) -> bool:
    return bool(t.dtype == dtype) and t.ndim == 1 and t.flags.c_contiguous and length in (None, t.shape[0])


def as_rows(x: Array) -> tuple[int, int, int]:
    """x [..., n] as (outer, inner, stride of outer): outer rows at any distance, each of `inner` adjacent rows of n."""
    n = x.shape[-1]
    if is_flat(x):
        return x.size // n, 1, n
    if x.ndim == 2:
        expect(is_rows(x), "rms_norm", "x", x, "float32 [T, n] with contiguous rows")
        return x.shape[0], 1, stride(x)
    expect(is_heads(x), "rms_norm", "x", x, "float32 [T, heads, n] with contiguous heads")
    return x.shape[0], x.shape[1], stride(x)


def _is_floats(t: Array, rank: int) -> bool:
    return t.dtype == np.float32 and t.ndim == rank and t.flags.aligned
