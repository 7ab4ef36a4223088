"""A kernel that does nothing but read: what the device's memory can give, for benches to compare with."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528
_BLOCK = 8192


@triton.jit
def _read(x, out, num, BLOCK: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, num, tl.num_programs(0) * BLOCK):
        acc += tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def read_all(x: Tensor, out: Tensor) -> None:
    """Read every float of x, a multiple of 8,192, once; `out` has room for 528 sums."""
    _read[(_PROGRAMS,)](x, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
