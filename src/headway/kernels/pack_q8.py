"""The 8-bit form of a matrix that its file keeps in groups of more than 4 bits: nothing is rounded.

Weights are d * (q - 128), q in 0..255, with a float32 d for 16 inputs of a column; or d * q + m, with a float32 m too.
What is called a column here is a row of w, as in the product.

    header │ panel of 48 columns │ panel │ … │ last panel, padded to a multiple of 16 columns
    a panel: group by group of 16 inputs, one cell for every 16 columns
    a cell: 4 x 64 bytes [16 columns, 4 inputs] │ 16 d │ 16 m       320 bytes, or 384: 10 or 12 bits for a weight
"""

from __future__ import annotations

import numpy as np

from headway.kernels.checks import Array, expect
from headway.kernels.pack import HEADER_BYTES, LANES, PANEL, Q8, Q8_FLOORS, format_of, header, shape_of

GROUP = 16
_BYTES = GROUP * LANES  # of a cell's weights


def cell_bytes(packing: int) -> int:
    """Of 16 columns and 16 inputs."""
    return _BYTES + (128 if packing == Q8_FLOORS else 64)


def pack_bytes(q: Array, d: Array, m: Array | None) -> Array:
    """q [out, in] uint8, d and m [out, in / 16] float32 -> the blob of d * q + m, or of d * (q - 128) without an m."""
    num_out, inputs = q.shape
    groups = inputs // GROUP
    fits = q.dtype == np.uint8 and groups * GROUP == inputs and d.shape == (num_out, groups)
    fits = fits and (m is None or m.shape == d.shape)
    expect(fits, "pack_bytes", "q", q, f"uint8 [out, whole groups of {GROUP}] with d, or d and m, for each group")
    packing = Q8 if m is None else Q8_FLOORS
    size, columns = cell_bytes(packing), -(-num_out // LANES) * LANES
    blob = np.zeros(HEADER_BYTES + columns // LANES * groups * size, np.uint8)
    blob[:HEADER_BYTES] = header(packing, num_out, inputs)
    for start in range(0, columns, PANEL):
        vectors = min(PANEL, columns - start) // LANES
        cells = blob[HEADER_BYTES + start // LANES * groups * size :][: vectors * groups * size]
        cells = cells.reshape(groups, vectors, size)
        rows = slice(start, min(start + PANEL, num_out))
        fours = _whole(q[rows], vectors * LANES).reshape(vectors, LANES, groups, 4, 4)
        cells[:, :, :_BYTES] = fours.transpose(2, 0, 3, 1, 4).reshape(groups, vectors, _BYTES)
        numbers = cells.view(np.float32)[:, :, _BYTES // 4 :]
        for index, side in enumerate([d] if m is None else [d, m]):
            lanes = _whole(side[rows], vectors * LANES).reshape(vectors, LANES, groups)
            numbers[:, :, index * LANES : (index + 1) * LANES] = lanes.transpose(2, 0, 1)
    return blob


def unpack(blob: Array) -> tuple[Array, Array, Array | None]:
    """The other way: (q, d, m or None); for the oracle and tests."""
    packing = format_of(blob)
    shape = shape_of(blob, Q8_FLOORS if packing == Q8_FLOORS else Q8)
    expect(shape is not None, "unpack", "blob", blob, "a matrix packed as 8-bit groups")
    assert shape is not None
    assert packing is not None
    num_out, num_in = shape
    size, groups, columns = cell_bytes(packing), num_in // GROUP, -(-num_out // LANES) * LANES
    q, numbers = [], []
    for start in range(0, columns, PANEL):
        vectors = min(PANEL, columns - start) // LANES
        cells = blob[HEADER_BYTES + start // LANES * groups * size :][: vectors * groups * size]
        cells = cells.reshape(groups, vectors, size)
        fours = cells[:, :, :_BYTES].reshape(groups, vectors, 4, LANES, 4)
        q.append(fours.transpose(1, 3, 0, 2, 4).reshape(vectors * LANES, num_in))
        sides = np.ascontiguousarray(cells[:, :, _BYTES:]).view(np.float32).reshape(groups, vectors, -1, LANES)
        numbers.append(sides.transpose(2, 1, 3, 0).reshape(-1, vectors * LANES, groups))
    sides = np.concatenate(numbers, 1)[:, :num_out]
    return np.concatenate(q)[:num_out], sides[0], sides[1] if packing == Q8_FLOORS else None


def _whole(rows: Array, count: int) -> Array:
    """As many rows, the missing ones zeros."""
    return np.concatenate([rows, np.zeros((count - len(rows), rows.shape[1]), rows.dtype)])
