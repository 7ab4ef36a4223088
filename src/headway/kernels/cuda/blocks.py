"""Whole KV blocks copied on the device, to pinned host memory and back; scattered blocks, one kernel.

device   [planes, blocks, cells of a block]          planes: keys and values of every layer
host     [blocks, planes, cells of a block]          one swapped block lies in one piece; likewise on its way there
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 1024


@triton.jit(do_not_specialize=["num"])
def _copy(src, dst, ids, num, S_BLOCK, S_PLANE, D_BLOCK, D_PLANE, WORDS, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    a = tl.load(ids + i).to(tl.int64)
    b = tl.load(ids + num + i).to(tl.int64)
    for start in range(0, WORDS, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(src + a * S_BLOCK + plane * S_PLANE + j, mask=j < WORDS)
        tl.store(dst + b * D_BLOCK + plane * D_PLANE + j, x, mask=j < WORDS)


def copy_blocks(
    src: Tensor, dst: Tensor, ids: Tensor, num: int, *, src_host: bool = False, dst_host: bool = False
) -> None:
    """Copy block ids[i] of `src` to block ids[num + i] of `dst` for i < num, none of them read and written.

    Both are int64 words: [planes, blocks, words] of the device, [blocks, planes, words] of the host.
    """
    planes = src.shape[1] if src_host else src.shape[0]
    words = src.shape[2]
    strides = [
        (t.stride(0), t.stride(1)) if host else (t.stride(1), t.stride(0))
        for t, host in ((src, src_host), (dst, dst_host))
    ]
    _copy[(num, planes)](src, dst, ids, num, *strides[0], *strides[1], words, BLOCK=_WORDS, num_warps=4)
