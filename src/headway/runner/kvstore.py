"""The paged KV memory: one array for all layers, another in host memory, and the block copies a plan orders.

It owns bytes. The ledger knows which request owns a block, the decoder what is written into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from headway.errors import ConfigError, EngineError
from headway.kernels.checks import Array
from headway.kernels.kv_format import kv_format
from headway.runner.pages import LARGE_PAGE, reserve
from headway.runner.slots import Slots
from headway.values.plan import BlockCopy, BlockRef, StepPlan, Tier


class KVStore:
    """Cells hold finite numbers from the start, in every format: an unwritten page reads as zeros.

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
        host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.host_blocks = host_blocks
        self.block_size = block_size
        kind = kv_format(kv_dtype)
        shape = (layers, 2, num_blocks, block_size, kv_heads, kind.head_size(head_dim))
        self.data = _reserve(shape, kind.dtype)  # [layers, key|value, num_blocks, block_size, kv_heads, record]
        # The same with block first: one swapped block lies in one piece, and no step ever computes on it.
        self._host = _reserve((host_blocks, *shape[:2], *shape[3:]), kind.dtype) if host_blocks else None
        self.block_bytes = self.data.nbytes // num_blocks
        self.block_layout = f"{kind.name}[layer {layers}, key|value, token {block_size}, head {kv_heads}, {shape[-1]}]"

    def touch(self) -> None:
        """Take the memory of every page now. Before anything is written: cells become zeros, which they were."""
        self.data.fill(0)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Run whole-block copies in their order: a later one may read what an earlier one wrote.

        Nothing is copied unless every reference is good.
        """
        for copy in copies:
            check_block(copy.src, self.num_blocks, self.host_blocks)
            check_block(copy.dst, self.num_blocks, self.host_blocks)
        for copy in copies:
            self._block(copy.dst)[...] = self._block(copy.src)

    def read(self, block: int, into: memoryview) -> None:
        """Copy the bytes of a block out, in the order of `block_layout`."""
        check_block(BlockRef(Tier.DEVICE, block), self.num_blocks, self.host_blocks)
        source = self._block(BlockRef(Tier.DEVICE, block))
        np.frombuffer(into, source.dtype).reshape(source.shape)[...] = source

    def write(self, block: int, data: memoryview, tokens: Sequence[int], start: int) -> None:
        """Copy the bytes of a block in; what its cells are computed for concerns a store that checks reads."""
        check_block(BlockRef(Tier.DEVICE, block), self.num_blocks, self.host_blocks)
        target = self._block(BlockRef(Tier.DEVICE, block))
        target[...] = np.frombuffer(data, target.dtype).reshape(target.shape)

    def release(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing of use any more. This store leaves their cells as they are."""

    def audit(self, plan: StepPlan, slots: Slots) -> dict[int, str]:
        """Rows that would read cells of another prefix, with the reason. This store does not check."""
        return {}

    def _block(self, ref: BlockRef) -> Array:
        """All layers' cells of a block: [layers, key|value, block_size, kv_heads, record]."""
        if ref.tier == Tier.DEVICE:
            block: Array = self.data[:, :, ref.id]
            return block
        assert self._host is not None, "references are checked before anything is copied"
        swapped: Array = self._host[ref.id]
        return swapped


def check_block(ref: BlockRef, num_blocks: int, host_blocks: int) -> None:
    """Raise EngineError unless a store with so many blocks has this one."""
    known = num_blocks if ref.tier == Tier.DEVICE else host_blocks
    if not known:
        raise EngineError(f"a block copy names tier {Tier(ref.tier).name}; this executor has DEVICE blocks only")
    if not 0 <= ref.id < known:
        name = f"{Tier(ref.tier).name} block {ref.id}"
        raise EngineError(f"a block copy names {name}; this executor has blocks 0 to {known - 1}")


_WORTH_LARGE_PAGES = LARGE_PAGE  # of one layer's keys: a page not yet full wastes at most the rest of a pool that small


def _reserve(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    # Zeros, because recycled memory may hold NaN, and a NaN under a mask is still one after it was multiplied by zero.
    # Large, because blocks lie all over the pool, and attention spends a sixth of its time on looking up small pages.
    num_bytes = prod(shape) * dtype.itemsize
    try:
        pages = reserve(num_bytes, is_large=num_bytes >= _WORTH_LARGE_PAGES * 2 * shape[0])
    except OSError as error:
        raise ConfigError(
            f"cannot reserve {num_bytes / 2**30:.2f} GiB for the KV pool ({error.strerror}); lower kv_memory_gb or "
            "swap_space_gb"
        ) from error
    return np.frombuffer(pages, dtype).reshape(shape)
