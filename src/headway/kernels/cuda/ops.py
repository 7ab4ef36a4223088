"""What a decoder on a CUDA device is made of: the operations, their operands, and no implementation.

The promise is that of `kernels.ops`: a row's bits depend on that row alone. Everything works on static buffers, so that
a step can be recorded once and replayed; every operation only queues work on the current stream. This file imports no
Triton, so that code which merely names these types runs where there is none.

    T tokens of a step, S samples, H query heads, KVH key heads, D head size, BS cells of a block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention."""

    num: int
    kv: int
    dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Decode rows of a step and how they are cut into items; written by `prepare`, read by every layer."""

    items: Tensor  # [I, 8] int32: (entry, segment or -1 for all, row, cells it sees, its first item)
    num_items: Tensor  # [1] int32
    turns: Tensor  # [layers, 4] int32: the first word counts items handed out; four, so all layers are aligned alike
    done: Tensor  # [R, KVH] int32: segments stored; 0 between launches
    part_acc: Tensor  # [I, H, D] float32
    part_max: Tensor  # [I, H] float32
    part_sum: Tensor  # [I, H] float32


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix as values times one factor per row and one per column; None: all factors are one.

    e4m3 values have a factor per row, which makes the row's largest number the largest that e4m3 has.
    """

    values: Tensor  # [rows, columns]
    rows: Tensor | None = None  # [rows] float32
    columns: Tensor | None = None  # [columns] float32


@dataclass(frozen=True, slots=True)
class KVCells:
    """One layer of the KV memory; block b begins at b times the first stride.

    In the activations' format both are [blocks, BS, KVH, D]. In e4m3 and int8 keys are [blocks, KVH, BS, D] and values
    [blocks, KVH, D, BS], since tensor cores read four adjacent cells of a value at once.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None  # [blocks, KVH, BS] int32: a key's factor in bfloat16, a value's in the high half


class CudaKernels(Protocol):
    """One implementation of every operation."""

    def attention_programs(self, heads: Heads) -> int:
        """Programs that decode attention runs on: what its work is cut for."""

    def prefill_programs(self, heads: Heads) -> int:
        """Programs that prefill attention runs on."""

    def embed_norm(
        self, tokens: Tensor, table: Tensor, weight: Tensor, residual: Tensor, out: Scaled, eps: float
    ) -> None:
        """residual = table[tokens], out = its norm; both [T, hidden]."""

    def add_norm(self, y: Scaled, residual: Tensor, weight: Tensor, out: Scaled, eps: float) -> None:
        """residual += y, out = its norm; all [T, hidden]."""

    def gather_norm(
        self, y: Scaled, residual: Tensor, weight: Tensor, sampled: Tensor, out: Tensor, eps: float
    ) -> None:
        """out [S, hidden] = norm of (residual + y)[sampled]."""

    def quantize(self, x: Tensor, out: Scaled) -> None:
        """out = x [T, hidden], rounded."""

    def linear(self, x: Scaled, w: Scaled, out: Tensor) -> Scaled:
        """x [T, K] times w [N, K] transposed; the values are `out` [T, N], the factors those of x and w."""

    def gate_up(self, x: Scaled, w: Scaled, between: Tensor, out: Scaled) -> None:
        """out [T, I] = silu(gate) * up, the halves of x times w [2 I, K] transposed; `between` [T, 2 I] is scratch."""

    def qkv(
        self,
        x: Scaled,
        w: Scaled,
        qkv: Tensor,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slot_map: Tensor,
        kv: KVCells,
        heads: Heads,
        eps: float,
    ) -> None:
        """Queries, rotated, in qkv [T, (H + 2 KVH) D]; keys, rotated, and values in their cells of the layer `kv`."""

    def decode_attention(
        self, qkv: Tensor, kv: KVCells, tables: Tensor, work: DecodeWork, layer: int, out: Tensor, heads: Heads
    ) -> None:
        """Attention of the decode rows, the step's first tokens."""

    def prefill_attention(
        self, qkv: Tensor, kv: KVCells, tables: Tensor, packet: Tensor, work: DecodeWork, out: Tensor, heads: Heads
    ) -> None:
        """Attention of the packet's prefill items; `work` lends its room for parts, which decode no longer needs."""
