"""Matrices as their file keeps them: groups of small integers with a step, and perhaps a floor, each.

Owns the way from the blocks of a file to two forms: groups of 32 inputs with 4 bits, in which a weight is d * q + m,

    Q4_0   x = d (q - 8)           m = -8 d
    Q4_1   x = d q + m             as it is
    Q4_K   x = (d s) q - dmin n    eight groups to a block; d becomes d s, m becomes -dmin n

and groups of 16 inputs with 8 bits, in which it is d * (q - 128) or d * q + m:

    Q5_0   x = d (q - 16)          q becomes q + 112; one step serves two groups, as in the next three
    Q5_1   x = d q + m             as it is
    Q5_K   x = (d s) q - dmin n    as Q4_K
    Q8_0   x = d q                 q becomes q + 128
    Q6_K   x = (d s) (q - 32)      sixteen groups to a block; d becomes d s, q becomes q + 96

In float32 these are the products `dequant` computes, so no weight moves. Knows neither files nor kernels. Imported
only when a tensor is touched: numpy starts here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from headway.modelfile.dequant import five_bits, five_bits_k, half, nibbles, scales_and_minima, six_bits_k

GROUP = 32
SMALL_GROUP = 16
MIDDLE = 128  # the q that stands for 0 where there is no floor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A matrix [rows, columns] of d * q + m, or d * (q - 128) without an m, `columns` being whole groups.

    Groups of 32 have an m and 4 bits, those of 16 have 8.
    """

    q: Bytes  # [rows, columns], 0 to 15, or to 255
    d: Floats  # [rows, groups]
    m: Floats | None  # [rows, groups]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return int(self.q.shape[1]) // int(self.d.shape[1])

    def floats(self) -> Floats:
        """The weights themselves."""
        rows, columns = self.q.shape
        x = self.q.reshape(rows, -1, self.size).astype(np.float32)
        # A hostile step may be infinite; this file does not judge weights.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.m is None:
                x -= np.float32(MIDDLE)
            x *= self.d[:, :, None]
            if self.m is not None:
                x += self.m[:, :, None]
        return x.reshape(rows, columns)

    def small(self, has_floors: bool) -> Groups:
        """The same weights in groups of 16, with an m whether they need one or not if `has_floors`."""
        times = self.size // SMALL_GROUP
        d, m = self.d, self.m
        if m is None and has_floors:
            m = np.float32(-MIDDLE) * d
        return Groups(self.q, d.repeat(times, 1), None if m is None else m.repeat(times, 1))


def read_groups(raw: memoryview | bytes, kind: str, shape: tuple[int, ...]) -> Groups | None:
    """The groups of a matrix in the format `kind`; None where the format has other ones, or it is no matrix."""
    found = _FORMATS.get(kind)
    if found is None or len(shape) != 2:
        return None
    block_bytes, size, read = found
    with np.errstate(over="ignore", invalid="ignore"):
        groups = read(np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes))
    wide = (shape[0], shape[1] // size)
    m = None if groups.m is None else groups.m.reshape(wide)
    return Groups(groups.q.reshape(shape), groups.d.reshape(wide), m)


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


def _q5_0(blocks: Bytes) -> Groups:
    return Groups(five_bits(blocks[:, 2:22]) + np.uint8(MIDDLE - 16), half(blocks, 0).repeat(2, 1), None)


def _q5_1(blocks: Bytes) -> Groups:
    return Groups(five_bits(blocks[:, 4:24]), half(blocks, 0).repeat(2, 1), half(blocks, 2).repeat(2, 1))


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(blocks[:, 2:34] + np.uint8(MIDDLE), half(blocks, 0).repeat(2, 1), None)


def _q5_k(blocks: Bytes) -> Groups:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    d, m = half(blocks, 0) * scales[:, :, 0], -(half(blocks, 2) * minima[:, :, 0])
    return Groups(five_bits_k(blocks), d.repeat(2, 1), m.repeat(2, 1))


def _q6_k(blocks: Bytes) -> Groups:
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Groups(six_bits_k(blocks) + np.uint8(MIDDLE - 32), half(blocks, 208) * scales, None)


_FORMATS: Mapping[str, tuple[int, int, Callable[[Bytes], Groups]]] = MappingProxyType(
    {
        "Q4_0": (18, GROUP, _q4_0),
        "Q4_1": (20, GROUP, _q4_1),
        "Q4_K": (144, GROUP, _q4_k),
        "Q5_0": (22, SMALL_GROUP, _q5_0),
        "Q5_1": (24, SMALL_GROUP, _q5_1),
        "Q5_K": (176, SMALL_GROUP, _q5_k),
        "Q6_K": (210, SMALL_GROUP, _q6_k),
        "Q8_0": (34, SMALL_GROUP, _q8_0),
    }
)
