"""The two matrices of a low-rank update in the order in which kernels read them.

    y += ((x a^T) * scales) b^T        x [T, in], a [rank, in], b [out, rank], y [T, out]

    shrink  [rank / 8, in / 16, 8, 16]      a, in pieces of sixteen inputs for eight ranks at a time
    expand  [out / 16, rank, 16]            b, in pieces of sixteen outputs for every rank

Ranks are padded to a multiple of 8, inputs and outputs to one of 16, with zeros. Numbers are float32, float16 or signed
bytes; `scales` has what all numbers of one rank are to be multiplied by. This file knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.kernels.checks import Array, address

MOST_RANKS = 256
RANK_BLOCK, PIECE = 8, 16  # kRankBlock of level.h, and its sixteen lanes
NUMBERS: dict[str, type[np.generic]] = {"float32": np.float32, "fp16": np.float16, "int8": np.int8}
"""How numbers can be kept, in the order of the library's formats."""
_CODES = {np.dtype(kind): code for code, kind in enumerate(NUMBERS.values())}
_MOST_HALF, _MOST_BYTE = 65504.0, 127.0

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LowRank:
    """Packed; `rank` is the padded one."""

    num_in: int
    num_out: int
    rank: int
    shrink: Array
    expand: Array
    scales: Floats  # [rank]

    @property
    def num_bytes(self) -> int:
        return self.shrink.nbytes + self.expand.nbytes + self.scales.nbytes

    @property
    def words(self) -> tuple[int, int, int, int, int]:
        """As the library reads them: addresses of shrink, expand and scales, the rank, the format."""
        return (
            *(address(self.shrink), address(self.expand), address(self.scales)),
            *(self.rank, _CODES[self.shrink.dtype]),
        )


def pack_low_rank(a: Floats, b: Floats, scale: float, numbers: str = "float32") -> LowRank:
    """a [rank, in] and b [out, rank], kept as `numbers` of NUMBERS; float32 where one is too large for float16."""
    rank, num_in = a.shape
    num_out = len(b)
    if numbers == "fp16" and max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)) > _MOST_HALF:
        numbers = "float32"
    ranks, ins, outs = (_up(rank, RANK_BLOCK), _up(num_in, PIECE), _up(num_out, PIECE))
    wide_a, wide_b = np.zeros((ranks, ins), np.float32), np.zeros((ranks, outs), np.float32)
    wide_a[:rank, :num_in], wide_b[:rank, :num_out] = a, b.T
    scales = np.full(ranks, scale, np.float32)
    if numbers == "int8":
        for wide in (wide_a, wide_b):
            steps = np.abs(wide).max(1) / np.float32(_MOST_BYTE)  # [rank]
            np.rint(wide / np.where(steps > 0, steps, 1)[:, None], out=wide)
            with np.errstate(over="ignore"):  # whose update is infinite is for the caller to refuse
                scales *= steps
    kind = NUMBERS[numbers]
    shrink = wide_a.astype(kind).reshape(ranks // RANK_BLOCK, RANK_BLOCK, ins // PIECE, PIECE).transpose(0, 2, 1, 3)
    expand = wide_b.astype(kind).reshape(ranks, outs // PIECE, PIECE).transpose(1, 0, 2)
    return LowRank(num_in, num_out, ranks, np.ascontiguousarray(shrink), np.ascontiguousarray(expand), scales)


def unpack_low_rank(w: LowRank) -> tuple[Floats, Floats]:
    """(a [rank, in], b [out, rank]) as float32, ranks padded and nothing scaled."""
    a = w.shrink.transpose(0, 2, 1, 3).reshape(w.rank, -1)[:, : w.num_in]
    b = w.expand.transpose(0, 2, 1).reshape(-1, w.rank)[: w.num_out]
    return a.astype(np.float32), b.astype(np.float32)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
