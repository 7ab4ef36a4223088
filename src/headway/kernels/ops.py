"""The operations a decoder is made of: their signatures, shapes and the guarantee of every implementation.

Exactness: a row's result is a function of that row alone. Its bits do not depend on how many rows share the
call, on the row's place among them, or on how its prompt was cut into chunks. Everything is float32 unless said.
Arrays are numpy's; a set that computes with another
library shares their memory with it. This file knows no implementation and no model.

    T tokens of a step · R requests (rows) · H query heads · KVH key heads · D head size · I inner size

A layer of KV is a contiguous [2, num_blocks, block_size, KVH, record]. The record of a head is D float32 or float16
numbers, or 4 + D bytes (uint8): a float32 scale and D signed bytes that it multiplies. What is read is what was kept,
widened to float32; so exactness holds for every one of these formats. A record of zero bytes is D zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headway.kernels.checks import Array
from headway.kernels.library import Context
from headway.kernels.low_rank import LowRank


class PagedRows(Protocol):
    """What attention needs to know of a step. A table is padded with block 0, which may belong to another request."""

    @property
    def positions(self) -> Array:  # [T] int64: the query at position p sees tokens 0..p of its row
        ...

    @property
    def row_of(self) -> Array:  # [T] int32: index into tables
        ...

    @property
    def tables(self) -> Array:  # [R, W] int32: block ids
        ...

    @property
    def query_start(self) -> Array:  # [R + 1] int32: row r owns tokens query_start[r] : query_start[r + 1]
        ...

    @property
    def context(self) -> Array:  # [R] int32: tokens visible to the row after this step
        ...

    @property
    def block_size(self) -> int: ...


class Attention(Protocol):
    """See `KernelSet.attention`."""

    def __call__(
        self, q: Array, kv_layer: Array, rows: PagedRows, scale: float, window: int = 0, cap: float = 0.0, /
    ) -> Array: ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One implementation of every operation. A weight packed by one set is only fed to sets of equal `layout`."""

    name: str
    """For people: ref, native-avx512."""

    layout: str
    """Names the packed weight format and its version; part of the weight cache's key."""

    pack: Callable[[Array], Array]
    """pack(w [out, in]) -> the form `linear` and `embed` take: contiguous, float32 of any rank or a blob of bytes."""

    embed: Callable[[Array, Array], Array]
    """embed(packed w [out, in], tokens [T] int64) -> [T, in]: rows of the matrix that was packed, unchanged."""

    linear: Callable[[Array, Array, Array | None, int], Array]
    """linear(x [T, in], packed w, bias [out] or None, out) -> [T, out]; `out` since packing may pad it."""

    rms_norm: Callable[[Array, Array, float], Array]
    """rms_norm(x [..., n], weight [n], eps) -> like x. x may be a view whose last dimension is contiguous."""

    rope: Callable[[Array, Array, Array, Array, Array], None]
    """rope(q [T, H, D], k [T, KVH, D], positions [T] int64, cos [L, R/2], sin [L, R/2]), in place; R <= D.

    Of the first R numbers of a head, halves rotate together: (a, b) of R/2 each becomes (a cos - b sin, b cos + a sin).
    q and k may be views of one fused row: only their last two dimensions are contiguous."""

    write_kv: Callable[[Array, Array, Array, Array], None]
    """write_kv(k [T, KVH, D], v [T, KVH, D], a layer of KV in any format, slot_map [T] int64).

    slot_map is the flat cell, block * block_size + offset. k and v may be views like those of rope. Halves are rounded
    to nearest even. Bytes are x / scale rounded half to even with scale = largest magnitude of the head / 127; a head
    with an element that is not finite gets a scale that is not a number."""

    attention: Attention
    """attention(q [T, H, D], a layer of KV in any format, rows, scale, window, cap) -> [T, H, D] contiguous.

    Causal, over the row's own tokens, the new ones included; of these over the last `window`, the query's own among
    them, if that is not 0. A cap that is not 0 bounds the scaled scores as `soft_cap` does. Cells past the row's
    context and other rows' cells may hold any value, NaN included, and never affect the result. Query head h reads
    key head h // (H / KVH). q may be a view like that of rope."""

    silu_mul: Callable[[Array], Array]
    """silu_mul(gate_up [T, 2 I]) -> [T, I]: silu(gate) * up, gate being the first half."""

    gelu_mul: Callable[[Array], Array]
    """gelu_mul(gate_up [T, 2 I]) -> [T, I]: as silu_mul with gelu, by its approximation with tanh."""

    soft_cap: Callable[[Array, float], Array]
    """soft_cap(x, cap) -> like x: cap * tanh(x / cap), cap above 0, of a contiguous x."""

    layer_norm: Callable[[Array, Array, Array, float], Array] | None = None
    """layer_norm(x [T, n], weight [n], bias [n], eps) -> [T, n]. Only encoders need it, and `gelu`."""

    gelu: Callable[[Array], Array] | None = None
    """gelu(x) -> like x: x / 2 (1 + erf(x / sqrt 2)) within 1e-6, of a contiguous x."""

    adapt: Callable[[Array, LowRank, Array], None] | None = None
    """adapt(x [T, in], w, y [T, out]): what an adapter adds to a product, see `LowRank`, in place.

    y may be some columns of wider rows. None: the set runs no adapters."""

    digest: str = ""
    """Of the compiled library behind the set; empty where there is none."""

    fallback: str = ""
    """Why a slower set than could be had was taken; empty where none was."""

    native: Context | None = None
    """The library behind the set, where it has one: it can run whole steps, see `headway.models.native`."""

    pack_table: Callable[[Array], Array] | None = None
    """As `pack`, for embeddings and heads, where the set keeps those finer than other matrices."""

    pack_groups: Callable[[Array, Array, Array], Array] | None = None
    """pack_groups(q [out, in] uint8 of 0..15, d [out, in / 32], m [out, in / 32]) -> as `pack` of the weights d q + m,
    where the set computes with such groups and takes them as they are."""

    pack_bytes: Callable[[Array, Array, Array | None], Array] | None = None
    """pack_bytes(q [out, in] uint8, d [out, in / 16], m [out, in / 16] or None) -> as `pack` of the weights d q + m, or
    d (q - 128), where the set computes with such groups and takes them as they are."""
