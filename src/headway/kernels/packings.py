"""Every dtype's packing by name, and what a blob on disk must be to be taken for a matrix. Knows no kernel."""

from __future__ import annotations

import numpy as np

from headway.kernels import pack, pack_q4, pack_q8
from headway.kernels.checks import Array
from headway.kernels.pack import (
    BF16,
    F32,
    HEADER_BYTES,
    I8,
    LANES,
    MAGIC,
    Q4,
    Q4_FLOATS,
    Q4_WIDE,
    Q8,
    Q8_FLOORS,
    Packing,
)

PACKINGS = {
    "float32": Packing(F32, "panel48-f32-3", pack.pack_f32, pack.pack_f32, pack_q4.pack_exactly),
    "bfloat16": Packing(BF16, "panel48-bf16-1", pack.pack_bf16),
    "int8": Packing(I8, "panel48-i8-1", pack.pack_i8),
    "q4": Packing(Q4, "panel48-q4-2", pack_q4.pack, pack.pack_i8, pack_q4.pack_groups, pack_q8.pack_bytes),
}


def is_blob(blob: Array, num_out: int, num_in: int) -> bool:
    """Whether this is a packed matrix [num_out, num_in] in whatever form, as far as its header and size tell."""
    if blob.dtype != np.uint8 or blob.ndim != 1 or blob.size < HEADER_BYTES:
        return False
    magic, number, *shape = blob[:32].view(np.int64).tolist()
    return magic == MAGIC and shape == [num_out, num_in] and blob.size == _num_bytes(number, num_out, num_in)


def _num_bytes(number: int, num_out: int, num_in: int) -> int | None:
    columns = -(-num_out // LANES) * LANES
    if number == BF16:
        return HEADER_BYTES + -(-num_in // 2) * 4 * columns
    if number == I8:
        return HEADER_BYTES + columns * (4 + -(-num_in // pack.GROUP_I8) * pack.GROUP_I8)
    if number in (Q4, Q4_FLOATS, Q4_WIDE):
        cell_bytes = pack_q4.WIDE_CELL_BYTES if number == Q4_WIDE else pack_q4.CELL_BYTES
        return HEADER_BYTES + columns // LANES * -(-num_in // pack_q4.GROUP) * cell_bytes
    if number in (Q8, Q8_FLOORS):
        return HEADER_BYTES + columns // LANES * -(-num_in // pack_q8.GROUP) * pack_q8.cell_bytes(number)
    return None
