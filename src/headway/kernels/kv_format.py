"""How keys and values are kept: the formats of the KV memory, what a record of each is and how many bytes it takes.

A record is one head of one token. The kernel sets hold the operations that read and write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, EngineError


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A record of `prefix` + D elements of `dtype`."""

    name: str
    """As `kv_dtype` in the configuration."""

    code: int
    """As the C interface numbers it."""

    dtype: np.dtype[Any]
    """Of the array that holds the records."""

    prefix: int
    """Elements of a record before its D numbers: for int8 the four bytes of the float that multiplies them."""

    def head_size(self, dim: int) -> int:
        """Elements of a record: the last axis of a layer of KV."""
        return self.prefix + dim

    def head_bytes(self, dim: int) -> int:
        """Bytes of a record."""
        return self.head_size(dim) * self.dtype.itemsize


FLOAT32 = KVFormat("float32", 0, np.dtype(np.float32), 0)
FP16 = KVFormat("fp16", 1, np.dtype(np.float16), 0)
INT8 = KVFormat("int8", 2, np.dtype(np.uint8), 4)
KV_FORMATS = (FLOAT32, FP16, INT8)


def kv_format(kv_dtype: str) -> KVFormat:
    """The format a configuration names."""
    for known in KV_FORMATS:
        if known.name == kv_dtype:
            return known
    raise ConfigError(f"kv_dtype is {kv_dtype!r}; allowed: {', '.join(known.name for known in KV_FORMATS)}")


def format_of(kv: NDArray[Any]) -> KVFormat:
    """The format of a KV array, by its dtype."""
    for known in KV_FORMATS:
        if known.dtype == kv.dtype:
            return known
    allowed = ", ".join(str(known.dtype) for known in KV_FORMATS)
    raise EngineError(f"keys and values are kept as {kv.dtype}; allowed: {allowed}")
