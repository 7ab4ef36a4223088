"""The 4-bit form of a matrix: weights d * q + m, q in 0..15, with a float16 d and m for 32 inputs of a column.

Owns the blob's layout and the rounding of floats to it. Files that keep such groups are packed as they are
(`pack_groups`); any other matrix is rounded (`pack`). What is called a column here is a row of w, as in the product.

    header │ panel of 48 columns │ panel │ … │ last panel, padded to a multiple of 16 columns
    a panel: group by group of 32 inputs, one cell for every 16 columns
    a cell: 4 x 64 bytes [16 columns, 4 inputs] │ 16 d │ 16 m       320 bytes: 5 bits for a weight

Byte j of a column in part v of a cell has input 8 v + j in its low nibble and input 8 v + 4 + j in its high one.
"""

from __future__ import annotations

import numpy as np

from headway.errors import ModelFormatError
from headway.kernels.checks import Array, expect
from headway.kernels.pack import HEADER_BYTES, LANES, PANEL, Q4, Q4_FLOATS, Q4_WIDE, header, pack_f32, shape_of

GROUP = 32
CELL_BYTES = 320
WIDE_CELL_BYTES = 384  # with d and m as floats
NIBBLE_BYTES = 256
_VECTORS = PANEL // LANES
_ROUND_ELEMENTS = 1 << 18  # floats that are rounded at once: what a cache holds, whatever the size of the matrix


def pack(w: Array) -> Array:
    """w [out, in] -> the blob of the nearest groups."""
    expect(w.ndim == 2 and w.dtype == np.float32, "pack", "w", w, "float32 [out, in]")
    num_out, num_in = w.shape
    step = max(1, _ROUND_ELEMENTS // num_in)
    parts = [round_groups(w[start : start + step]) for start in range(0, num_out, step)]
    q, d, m = (np.concatenate(side) for side in zip(*parts, strict=True))
    return pack_groups(q, d, m, num_in)


def pack_groups(q: Array, d: Array, m: Array, num_in: int | None = None) -> Array:
    """q [out, in] uint8, d and m [out, in / 32] float32 -> the blob of d * q + m, d and m rounded to float16.

    `num_in` says how many of the inputs are meant where `in` was padded to whole groups.
    """
    num_out, inputs = q.shape
    groups = inputs // GROUP
    fits = q.dtype == np.uint8 and groups * GROUP == inputs and d.shape == m.shape == (num_out, groups)
    expect(fits, "pack_groups", "q", q, f"uint8 [out, whole groups of {GROUP}] with d and m for each group")
    with np.errstate(over="ignore"):
        scales = np.stack([d, m], 2).astype(np.float16)  # [out, groups, 2]
    if not np.isfinite(scales).all():
        size = float(np.maximum(np.abs(d).max(), np.abs(m).max()))
        raise ModelFormatError(f"weights as large as {size} have no 4-bit form, which ends at 65504; use --dtype int8")
    return _cells(q, scales, header(Q4, num_out, num_in or inputs))


def _cells(q: Array, scales: Array, first: Array) -> Array:
    """The blob that begins with a header, of whole groups q [out, in] with scales [out, groups, d and m]."""
    num_out, groups = scales.shape[:2]
    columns = -(-num_out // LANES) * LANES
    cell_bytes = NIBBLE_BYTES + 2 * LANES * scales.itemsize
    blob = np.zeros(HEADER_BYTES + columns // LANES * groups * cell_bytes, np.uint8)
    blob[:HEADER_BYTES] = first
    whole = num_out // PANEL * PANEL
    for start, end in ((0, whole), (whole, num_out)):
        if start == end:
            continue
        vectors = _VECTORS if start < whole else (columns - start) // LANES
        cells = blob[HEADER_BYTES + start // LANES * groups * cell_bytes :][
            : -(-(end - start) // LANES) * groups * cell_bytes
        ]
        _fill(cells.reshape(-1, groups, vectors, cell_bytes), q[start:end], scales[start:end])
    return blob


def pack_exactly(q: Array, d: Array, m: Array) -> Array:
    """The weights d * q + m in float32 without loss: as 4-bit groups that become floats when they are multiplied, d and
    m as float16 where that holds them all; packed as floats where they are not finite."""
    if all(_fits_half(side) for side in (d, m)):
        blob = pack_groups(q, d, m)
        blob[:HEADER_BYTES] = header(Q4_FLOATS, *q.shape)
        return blob
    if all(np.isfinite(side).all() for side in (d, m)):
        return _cells(q, np.stack([d, m], 2).astype(np.float32), header(Q4_WIDE, *q.shape))
    num_out, num_in = q.shape
    with np.errstate(invalid="ignore", over="ignore"):  # a matrix that is not finite stays one
        weights = q.reshape(num_out, -1, GROUP) * d[:, :, None] + m[:, :, None]
    return pack_f32(weights.reshape(num_out, num_in))


def unpack(blob: Array) -> tuple[Array, Array, Array]:
    """The other way: (q [out, padded in] uint8, d and m [out, groups] float32); for the oracle and tests."""
    shape = shape_of(blob, Q4)
    expect(shape is not None, "unpack", "blob", blob, "a matrix packed as 4-bit groups")
    assert shape is not None
    num_out, num_in = shape
    groups, columns = -(-num_in // GROUP), -(-num_out // LANES) * LANES
    q, scales = [], []
    for start in range(0, columns, PANEL):
        vectors = min(_VECTORS, (columns - start) // LANES)
        cells = blob[HEADER_BYTES + start // LANES * groups * CELL_BYTES :][: vectors * groups * CELL_BYTES]
        cells = cells.reshape(groups, vectors, CELL_BYTES)
        pairs = cells[:, :, :NIBBLE_BYTES].reshape(groups, vectors, 4, LANES, 4)
        both = np.stack([pairs & 15, pairs >> 4], 3)  # [groups, vectors, 4, 2, 16, 4]
        q.append(both.transpose(1, 4, 0, 2, 3, 5).reshape(vectors * LANES, groups * GROUP))
        halves = np.ascontiguousarray(cells[:, :, NIBBLE_BYTES:]).view(np.float16)  # [groups, vectors, 32]
        halves = halves.reshape(groups, vectors, 2, LANES)
        scales.append(halves.transpose(1, 3, 0, 2).reshape(vectors * LANES, groups, 2))
    both = np.concatenate(scales)[:num_out].astype(np.float32)
    return np.concatenate(q)[:num_out], both[:, :, 0], both[:, :, 1]


def round_groups(w: Array) -> tuple[Array, Array, Array]:
    """(q, d, m) for w [out, in], `in` padded to whole groups: from a group's smallest to its largest weight in 15
    steps, d and m already rounded to what is stored."""
    num_out, num_in = w.shape
    groups = -(-num_in // GROUP)
    # What is padded repeats the last weight: a zero would widen the last group.
    padding = w[:, -1:].repeat(groups * GROUP - num_in, 1)
    # Weight by weight of all groups: numpy is slow over many short axes.
    x = np.concatenate([w, padding], 1).reshape(-1, GROUP).T.copy()
    with np.errstate(over="ignore", invalid="ignore"):  # what has no 4-bit form is refused when it is packed
        m = x.min(0).astype(np.float16).astype(np.float32)
        d = ((x.max(0) - m) / np.float32(15)).astype(np.float16).astype(np.float32)
        x -= m
        x /= np.where(d == 0, np.float32(1), d)
        q = np.clip(np.rint(x, out=x), 0, 15, out=x).astype(np.uint8)
    shape = (num_out, groups)
    return q.T.reshape(num_out, groups * GROUP), d.reshape(shape), m.reshape(shape)


def _fits_half(side: Array) -> bool:
    with np.errstate(over="ignore"):
        halves = side.astype(np.float16)
    return bool(np.isfinite(side).all()) and np.array_equal(halves.astype(np.float32), side)


def _fill(cells: Array, q: Array, scales: Array) -> None:
    """Write rows of groups into the cells [panels, groups, vectors, CELL_BYTES] of as many columns, or a few more."""
    panels, groups, vectors, _ = cells.shape
    columns, rows = panels * vectors * LANES, q.shape[0]
    if rows < columns:
        q = np.concatenate([q, np.zeros((columns - rows, q.shape[1]), np.uint8)])
        scales = np.concatenate([scales, np.zeros((columns - rows, groups, 2), scales.dtype)])
    fours = np.ascontiguousarray(q).view(np.uint32).reshape(panels, vectors, LANES, groups, 4, 2)
    # Four nibbles at once: none reaches into the byte above it.
    packed = fours[..., 0] | ((fours[..., 1] & np.uint32(0x0F0F0F0F)) << np.uint32(4))
    nibbles = cells.view(np.uint32)[..., : NIBBLE_BYTES // 4].reshape(panels, groups, vectors, 4, LANES)
    nibbles[...] = packed.transpose(0, 3, 1, 4, 2)
    numbers = cells.view(scales.dtype)[..., NIBBLE_BYTES // scales.itemsize :]
    numbers.reshape(panels, groups, vectors, 2, LANES)[...] = scales.reshape(
        panels, vectors, LANES, groups, 2
    ).transpose(0, 3, 1, 4, 2)
