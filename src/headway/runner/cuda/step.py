"""One step on the device: fetch, prepare, decoder, sample. Queued as launches, or recorded and replayed.

It owns the buffers between these kernels and knows neither plans nor requests. A step has a bucket: so many tokens and
samples, padding included, with or without chunks. Bits do not depend on the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headway.kernels.cuda import rows
from headway.kernels.cuda.attention import MAX_SEGMENTS
from headway.kernels.cuda.ops import DecodeWork, Heads, KVCells
from headway.models.cuda import CudaDecoder, StepBuffers
from headway.runner.cuda.sampler import DeviceSampler
from headway.runner.cuda.state import DeviceState
from headway.runner.cuda.wire import Wire

_FETCH_BLOCK = 1024
_FETCH_PROGRAMS = 16
_CHUNK_BLOCK = 1024


class Bucket(NamedTuple):
    """What one recorded step has room for."""

    tokens: int
    samples: int
    is_mixed: bool
    is_special: bool = False  # a row asks for more than a temperature, or has a mask


class DeviceStep:
    """Every launch works on the same memory, whatever its bucket."""

    def __init__(
        self,
        decoder: CudaDecoder,
        sampler: DeviceSampler,
        state: DeviceState,
        kv: Sequence[KVCells],
        *,
        lines: int,
        max_tokens: int,
        packet_words: int,
        work: DecodeWork,
        attention_programs: int,
    ) -> None:
        self.decoder = decoder
        self._sampler, self._state, self._kv = sampler, state, kv
        self._lines, self._programs = lines, attention_programs

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        device = kv[0].keys.device
        self._is_cuda = device.type == "cuda"
        self._buffers = StepBuffers(
            packet=words(packet_words),
            tables=state.tables,
            tokens=words(max_tokens),
            positions=words(max_tokens),
            slot_map=words(max_tokens),
            sampled=words(lines),
            decode=work,
        )
        self._sampled_rows = words(lines)
        self._places = words(lines)  # positions of what is sampled

    def launch(self, bucket: Bucket, wire: Wire, *, is_trial: bool = False) -> None:
        """Queue every kernel of one step that reads from and reports to `wire`; in a trial each at least once."""
        self._prepare(bucket, wire)
        sizes = (bucket.tokens, bucket.samples, bucket.is_mixed)
        logits = self.decoder.launch(self._buffers, self._kv, *sizes, is_trial=is_trial)
        sampled = (self._sampled_rows, self._places, self._buffers.packet)
        self._sampler.launch(logits, *sampled, wire, is_special=bucket.is_special)

    def _prepare(self, bucket: Bucket, wire: Wire) -> None:
        state, buffers, work = self._state, self._buffers, self._buffers.decode
        heads, width = self.decoder.heads, state.tables.stride(0)
        rows.fetch[(_FETCH_PROGRAMS,)](
            *(wire.packets, wire.counter, buffers.packet, state.words, wire.began, wire.packets.shape[1]),
            **{"SLOTS": wire.slots, "BLOCK": _FETCH_BLOCK, "CLOCK": self._is_cuda, "num_warps": 4},
        )
        pad = 0 if bucket.is_mixed else bucket.tokens
        rows.prepare_decode[(1,)](
            *(buffers.packet, state.records, state.tables, buffers.tokens, buffers.positions, buffers.slot_map),
            *(buffers.sampled, self._sampled_rows, self._places, work.items, work.num_items, work.turns, width, pad),
            *(work.turns.numel(), state.num_rows, self._programs),
            **{"KVH": heads.kv, "BS": heads.block_size, "BLOCK": self._lines, "num_warps": 8},
        )
        if bucket.is_mixed:
            rows.prepare_chunks[(triton.cdiv(bucket.tokens, _CHUNK_BLOCK),)](
                *(buffers.packet, state.records, state.tables, buffers.tokens, buffers.positions, buffers.slot_map),
                *(buffers.sampled, self._sampled_rows, self._places, width, bucket.tokens, bucket.samples),
                *(state.num_rows,),
                **{"BS": heads.block_size, "BLOCK": _CHUNK_BLOCK, "num_warps": 8},
            )


def make_work(lines: int, layers: int, heads: Heads, programs: int, device: torch.device) -> DecodeWork:
    """The work list of decode attention, and room for the parts of rows that are cut."""

    def words(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def reals(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    # At most programs / kv_heads rows are longer than an even share, and fewer than that are left over.
    items = min(lines, 2 * programs // heads.kv + 1) * MAX_SEGMENTS + lines
    return DecodeWork(
        items=words(items, 8),
        num_items=words(1),
        turns=words(layers, 4),
        done=words(lines, heads.kv),
        part_acc=reals(items, heads.num, heads.dim),
        part_max=reals(items, heads.num),
        part_sum=reals(items, heads.num),
    )
