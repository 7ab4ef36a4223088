"""The paged KV memory: one tensor for all layers, and the block copies a plan orders.

It owns bytes. Which block belongs to whom is the ledger's business, and what is written into one the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from headway.errors import ConfigError, EngineError
from headway.kernels.kv_format import kv_format
from headway.runner.pages import LARGE_PAGE, reserve
from headway.values.plan import BlockCopy, BlockRef, Tier


class KVStore:
    """Cells are finite numbers from the first moment, in every format: a page that nobody wrote reads as zeros.

    The pages are reserved and not touched: a pool of gigabytes costs no memory until its blocks are used, in a pool
    that large by two megabytes at a time for the keys and for the values of each layer.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str = "float32",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        kind = kv_format(kv_dtype)
        shape = (layers, 2, num_blocks, block_size, kv_heads, kind.head_size(head_dim))
        self.data = _reserve(shape, kind.dtype)  # [layers, key|value, num_blocks, block_size, kv_heads, record]

    def touch(self) -> None:
        """Take the memory of every page now. Before anything is written: cells become zeros, which they were."""
        self.data.zero_()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Run whole-block copies in their order: a later one may read what an earlier one wrote.

        Nothing is copied unless every reference is good.
        """
        for copy in copies:
            self._check(copy.src)
            self._check(copy.dst)
        for copy in copies:
            self.data[:, :, copy.dst.id].copy_(self.data[:, :, copy.src.id])

    def _check(self, ref: BlockRef) -> None:
        if ref.tier != Tier.DEVICE:
            raise EngineError(f"a block copy names tier {Tier(ref.tier).name}; this executor has DEVICE blocks only")
        if not 0 <= ref.id < self.num_blocks:
            raise EngineError(f"a block copy names block {ref.id}; this executor has blocks 0 to {self.num_blocks - 1}")


_WORTH_LARGE_PAGES = LARGE_PAGE  # of one layer's keys: a page not yet full wastes at most the rest of a pool that small


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Zeros, because recycled memory may hold NaN, and a NaN under a mask is still one after it was multiplied by zero.
    # Large, because blocks lie all over the pool, and attention spends a sixth of its time on looking up small pages.
    num_bytes = prod(shape) * dtype.itemsize
    try:
        pages = reserve(num_bytes, is_large=num_bytes >= _WORTH_LARGE_PAGES * 2 * shape[0])
    except OSError as error:
        raise ConfigError(
            f"cannot reserve {num_bytes / 2**30:.2f} GiB for the KV pool ({error.strerror}); lower kv_memory_gb"
        ) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
