"""Matrices as their file keeps them in 4 bits: groups of 32 small integers with a step and a floor each.

Owns the way from the blocks of Q4_0, Q4_1 and Q4_K to one form, in which a weight is d * q + m:

    Q4_0   x = d (q - 8)           m = -8 d
    Q4_1   x = d q + m             as it is
    Q4_K   x = (d s) q - dmin n    eight groups to a block; d becomes d s, m becomes -dmin n

In float32 these are the products `dequant` computes, so no weight moves. Knows neither files nor kernels. Imported
only when a tensor is touched: numpy starts here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from headway.modelfile.dequant import half, nibbles, scales_and_minima

GROUP = 32

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A matrix [rows, columns] of d * q + m, `columns` being whole groups."""

    q: Bytes  # [rows, columns], 0 to 15
    d: Floats  # [rows, columns / 32]
    m: Floats  # [rows, columns / 32]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    def floats(self) -> Floats:
        """The weights themselves."""
        rows, columns = self.q.shape
        x = self.q.reshape(rows, columns // GROUP, GROUP).astype(np.float32)
        # A hostile step may be infinite; this file does not judge weights.
        with np.errstate(over="ignore", invalid="ignore"):
            x *= self.d[:, :, None]
            x += self.m[:, :, None]
        return x.reshape(rows, columns)


def read_groups(raw: memoryview | bytes, kind: str, shape: tuple[int, ...]) -> Groups | None:
    """The groups of a matrix in the format `kind`; None where the format has other ones, or it is no matrix."""
    found = _FORMATS.get(kind)
    if found is None or len(shape) != 2:
        return None
    block_bytes, read = found
    with np.errstate(over="ignore", invalid="ignore"):
        groups = read(np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes))
    wide = (shape[0], shape[1] // GROUP)
    return Groups(groups.q.reshape(shape), groups.d.reshape(wide), groups.m.reshape(wide))


def _q4_0(blocks: Bytes) -> Groups:
    d = half(blocks, 0)
    return Groups(nibbles(blocks[:, 2:18]), d, np.float32(-8) * d)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(nibbles(blocks[:, 4:20]), half(blocks, 0), half(blocks, 2))


def _q4_k(blocks: Bytes) -> Groups:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    packed = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    q = (packed >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & np.uint8(15)
    return Groups(q, half(blocks, 0) * scales[:, :, 0], -(half(blocks, 2) * minima[:, :, 0]))


_FORMATS: Mapping[str, tuple[int, Callable[[Bytes], Groups]]] = MappingProxyType(
    {"Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q4_K": (144, _q4_k)}
)
