"""The paged KV memory for the native kernels: writing cells and attending over them."""

from __future__ import annotations

import numpy as np

from headway.kernels.checks import Array, address, expect, in_range, is_heads, is_index, stride
from headway.kernels.kv_format import KVFormat, format_of
from headway.kernels.library import Context
from headway.kernels.ops import PagedRows


class NativeKV:
    """A layer of KV is [2, num_blocks, block_size, KVH, record], contiguous, in any format of `kv_format`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._call = context.call

    def write_kv(self, k: Array, v: Array, kv_layer: Array, slot_map: Array) -> None:
        """See KernelSet.write_kv."""
        rows, _, dim = k.shape
        kind = _format(kv_layer, "write_kv", dim)
        _, num_blocks, block_size, kv_heads, _ = kv_layer.shape
        for name, new in (("k", k), ("v", v)):
            fits = is_heads(new) and new.shape == (rows, kv_heads, dim)
            expect(fits, "write_kv", name, new, f"float32 [{rows}, {kv_heads}, {dim}]")
        expect(is_index(slot_map, np.int64, rows), "write_kv", "slot_map", slot_map, f"int64 [{rows}]")
        num_cells = num_blocks * block_size
        status = self._call["write_kv"](
            *(address(k), stride(k), address(v), stride(v), rows, kv_heads, dim),
            *(address(kv_layer), kind.code, num_cells, address(slot_map)),
        )
        in_range(status, "write_kv", f"a slot is outside 0..{num_cells - 1}")

    def attention(
        self, q: Array, kv_layer: Array, batch: PagedRows, scale: float, window: int = 0, cap: float = 0.0
    ) -> Array:
        """See KernelSet.attention."""
        rows, heads, dim = q.shape
        kind = _format(kv_layer, "attention", dim)
        _, num_blocks, block_size, kv_heads, _ = kv_layer.shape
        fits = heads % kv_heads == 0 and block_size == batch.block_size
        expect(fits, "attention", "kv_layer", kv_layer, f"of block size {batch.block_size}, KVH dividing {heads}")
        expect(is_heads(q), "attention", "q", q, "float32 [T, H, D] with contiguous heads")
        tables, row_of, positions = batch.tables, batch.row_of, batch.positions
        fits = tables.ndim == 2 and tables.dtype == np.int32 and tables.flags.c_contiguous
        expect(fits, "attention", "tables", tables, "contiguous int32 [R, W]")
        expect(is_index(row_of, np.int32, rows), "attention", "row_of", row_of, f"int32 [{rows}]")
        expect(is_index(positions, np.int64, rows), "attention", "positions", positions, f"int64 [{rows}]")
        y = np.empty((rows, heads, dim), np.float32)
        status = self._call["attention"](
            *(address(q), stride(q), rows, heads, kv_heads, dim),
            *(address(kv_layer), kind.code, num_blocks, block_size),
            *(address(tables), tables.shape[0], tables.shape[1], address(row_of), address(positions)),
            *(scale, window, cap, address(y)),
        )
        in_range(status, "attention", f"a row, position or block is outside its table or the {num_blocks} blocks")
        return y


def _format(kv_layer: Array, kernel: str, dim: int) -> KVFormat:
    kind = format_of(kv_layer)
    fits = kv_layer.ndim == 5 and kv_layer.shape[0] == 2 and kv_layer.shape[4] == kind.head_size(dim)
    fits = fits and kv_layer.flags.c_contiguous
    wanted = f"contiguous {kind.dtype} [2, num_blocks, block_size, KVH, {kind.head_size(dim)}]"
    expect(fits, kernel, "kv_layer", kv_layer, wanted)
    return kind
