"""The paged KV memory of a CUDA device, pinned host memory beside it, and the block copies a plan orders.

Copies are queued, never waited for. They run in waves: within one no block is written that another copy of it touches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.errors import EngineError
from headway.kernels.cuda.blocks import copy_blocks
from headway.kernels.cuda.ops import Heads
from headway.values.plan import BlockCopy, BlockRef, Tier


class CudaKVStore:
    """Cells are finite numbers from the first moment. `data` never moves: recorded steps hold its address."""

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        self.num_blocks, self.host_blocks, self.block_size = num_blocks, host_blocks, heads.block_size
        cells = (heads.block_size, heads.kv, heads.dim)
        # [layers, key|value, num_blocks, block_size, kv_heads, head_dim]
        self.data = torch.zeros((layers, 2, num_blocks, *cells), dtype=dtype, device=device)
        self._device_words = self.data.view(layers * 2, num_blocks, -1).view(torch.int64)
        self._host_words: Tensor | None = None
        if host_blocks:
            host = torch.zeros((host_blocks, *self._device_words.shape[::2]), dtype=torch.int64)
            self._host_words = host.pin_memory() if device.type == "cuda" else host
        self._is_cuda = device.type == "cuda"

    def copy(self, copies: Sequence[BlockCopy]) -> list[Tensor]:
        """Queue whole-block copies in their order; what is returned must live until they have run.

        Nothing is copied unless every reference is good.
        """
        for copy in copies:
            self._check(copy.src)
            self._check(copy.dst)
        return [self._run(wave) for wave in _waves(copies)]

    def _run(self, wave: Sequence[BlockCopy]) -> Tensor:
        """Copies of one wave have the same two tiers."""
        values = np.array([copy.src.id for copy in wave] + [copy.dst.id for copy in wave], np.int32)
        ids = torch.from_numpy(values)
        ids = ids.pin_memory() if self._is_cuda else ids
        src, dst = self._words(wave[0].src.tier), self._words(wave[0].dst.tier)
        hosts = {"src_host": wave[0].src.tier == Tier.HOST, "dst_host": wave[0].dst.tier == Tier.HOST}
        copy_blocks(src, dst, ids, len(wave), **hosts)
        return ids

    def _words(self, tier: Tier) -> Tensor:
        if tier == Tier.DEVICE:
            return self._device_words
        assert self._host_words is not None, "references are checked before anything is copied"
        return self._host_words

    def _check(self, ref: BlockRef) -> None:
        num_blocks = self.num_blocks if ref.tier == Tier.DEVICE else self.host_blocks
        if not num_blocks:
            raise EngineError(f"a block copy names tier {Tier(ref.tier).name}; this executor has DEVICE blocks only")
        if not 0 <= ref.id < num_blocks:
            name = f"{Tier(ref.tier).name} block {ref.id}"
            raise EngineError(f"a block copy names {name}; this executor has blocks 0 to {num_blocks - 1}")


def _waves(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    wave: list[BlockCopy] = []
    read: set[BlockRef] = set()
    written: set[BlockRef] = set()
    for copy in copies:
        changes = wave and (copy.src.tier, copy.dst.tier) != (wave[0].src.tier, wave[0].dst.tier)
        if changes or copy.src in written or copy.dst in written or copy.dst in read:
            yield wave
            wave, read, written = [], set(), set()
        wave.append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    if wave:
        yield wave
