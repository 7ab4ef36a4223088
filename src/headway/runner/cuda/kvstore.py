"""The paged KV memory of a CUDA device, pinned host memory beside it, and the block copies a plan orders.

Copies are queued, never waited for. They run in waves: within one no block is written that another copy of it touches.
Those to the host leave through an `Outbox`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cuda.blocks import copy_blocks
from headway.kernels.cuda.ops import Heads, KVCells
from headway.models.spec import ModelSpec
from headway.runner.cuda.outbox import Outbox
from headway.runner.kvstore import check_block
from headway.values.plan import BlockCopy, BlockRef, Tier

INT8 = torch.uint8  # 128 more than the number
_INT8_SPREAD = 32.0  # of random cells: four times that is the largest


def has_factors(dtype: torch.dtype) -> bool:
    """Whether cells of this format have a factor for each head."""
    return dtype in (torch.float8_e4m3fn, INT8)


class CudaKVStore:
    """Cells are finite numbers from the first moment. They never move: recorded steps hold their addresses."""

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
        make = _scaled_cells if has_factors(dtype) else _plain_cells
        self._device_words, self.layers = make(layers, num_blocks, heads, dtype, device)
        self._outbox: Outbox | None = None
        if host_blocks:
            host = torch.zeros((host_blocks, *self._device_words.shape[::2]), dtype=torch.int64)
            self._outbox = Outbox(self._device_words, host.pin_memory() if device.type == "cuda" else host)
        self._is_cuda = device.type == "cuda"

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        return self._device_words.nbytes // (self.num_blocks * self.block_size)

    def fill(self) -> None:
        """Random numbers in every cell, for measuring: zeros would flatter the device."""
        for kv in self.layers:
            spread, middle = (_INT8_SPREAD, 128.0) if kv.keys.dtype == INT8 else (1.0, 0.0)
            for cells in (kv.keys, kv.values):
                for start in range(0, self.num_blocks, 1024):
                    part = cells[start : start + 1024]
                    part.copy_(torch.randn(part.shape, device=part.device, dtype=torch.bfloat16) * spread + middle)
            if kv.scales is not None:
                kv.scales.fill_(0x3F803F80 if spread == 1.0 else 0x3D003D00)  # 1 or 1 / 32

    def copy(self, copies: Sequence[BlockCopy], on_start: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Queue whole-block copies in their order; what is returned must live until they have run.

        Nothing is copied, nor `on_start` called, unless every reference is good. Blocks for the host are gathered at
        once and leave by `send`.
        """
        for copy in copies:
            check_block(copy.src, self.num_blocks, self.host_blocks)
            check_block(copy.dst, self.num_blocks, self.host_blocks)
        waves = list(_waves(copies))
        on_start()
        return [held for wave in waves for held in self._run(wave)]

    def rehearse(self) -> None:
        """Launch what copies blocks, for none: it is compiled then."""
        ids = torch.zeros(16, dtype=torch.int32)
        ids = ids.pin_memory() if self._is_cuda else ids
        copy_blocks(self._device_words, self._device_words, ids, 0)
        if self._outbox is not None:
            self._outbox.rehearse(ids)

    def send(self) -> None:
        """Queue what is left to do of copies to the host, which no step waits for."""
        if self._outbox is not None:
            self._outbox.send()

    def _run(self, wave: Sequence[BlockCopy]) -> list[Tensor]:
        """Copies of one wave have the same two tiers."""
        srcs, dsts = [copy.src.id for copy in wave], [copy.dst.id for copy in wave]
        if wave[0].dst.tier == Tier.HOST:
            return self._to_host().gather(srcs, dsts)
        is_host = wave[0].src.tier == Tier.HOST
        src = self._to_host().arrived(srcs) if is_host else self._device_words
        ids = torch.from_numpy(np.array(srcs + dsts, np.int32))
        ids = ids.pin_memory() if self._is_cuda else ids
        copy_blocks(src, self._device_words, ids, len(wave), src_host=is_host)
        return [ids]

    def _to_host(self) -> Outbox:
        assert self._outbox is not None, "references are checked before anything is copied"
        return self._outbox


Cells = tuple[Tensor, list[KVCells]]  # [planes, blocks, words] int64, and the layers


def _plain_cells(layers: int, num_blocks: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> Cells:
    cells = (heads.block_size, heads.kv, heads.dim)
    data = torch.zeros((layers, 2, num_blocks, *cells), dtype=dtype, device=device)
    words = data.view(layers * 2, num_blocks, -1).view(torch.int64)
    return words, [KVCells(layer[0], layer[1]) for layer in data]


def _scaled_cells(layers: int, num_blocks: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> Cells:
    """A block of a layer in one piece: keys, values, factors."""
    size = heads.kv * heads.block_size * heads.dim
    whole = 2 * size + 4 * heads.kv * heads.block_size
    data = torch.zeros((layers, num_blocks, whole), dtype=torch.int8, device=device)
    found = []
    for layer in data:
        keys, values, scales = layer.split((size, size, whole - 2 * size), 1)
        keys = keys.view(dtype).unflatten(1, (heads.kv, heads.block_size, heads.dim))
        values = values.view(dtype).unflatten(1, (heads.kv, heads.dim, heads.block_size))
        found.append(KVCells(keys, values, scales.view(torch.int32).unflatten(1, (heads.kv, heads.block_size))))
    return data.view(torch.int64), found


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    factors = 4 * spec.kv_heads * block_size if has_factors(dtype) else 0
    return spec.layers * (2 * block_size * spec.kv_size * dtype.itemsize + factors)


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
