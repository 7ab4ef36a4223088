"""The 4-bit form of a matrix: weights d * q + m, q in 0..15, with a float16 d and m for 32 inputs of a column.

Owns the blob's layout and the rounding of floats to it. Files that keep such groups are packed as they are
(`pack_groups`); any other matrix is rounded (`pack`). What is called a column here is a row of w, as in the product.

    header │ panel of 48 columns │ panel │ … │ last panel, padded to a multiple of 16 columns
    a panel: group by group of 32 inputs, one cell for every 16 columns
    a cell: 4 x 64 bytes [16 columns, 4 inputs] │ 16 d │ 16 m       320 bytes: 5 bits for a weight

Byte j of a column in part v of a cell has input 8 v + j in its low nibble and input 8 v + 4 + j in its high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import ModelFormatError
from headway.kernels.checks import expect
from headway.kernels.pack import HEADER_BYTES, LANES, PANEL, Q4, Q4_FLOATS, header, pack_f32, shape_of

GROUP = 32
CELL_BYTES = 320
NIBBLE_BYTES = 256
_VECTORS = PANEL // LANES
_ROUND_ELEMENTS = 1 << 22  # floats that are rounded at once: a large matrix would need several times its size


def pack(w: Tensor) -> Tensor:
    """w [out, in] -> the blob of the nearest groups."""
    expect(w.dim() == 2 and w.dtype == torch.float32, "pack", "w", w, "float32 [out, in]")
    num_out, num_in = w.shape
    step = max(1, _ROUND_ELEMENTS // num_in)
    parts = [round_groups(w[start : start + step]) for start in range(0, num_out, step)]
    q, d, m = (torch.cat(side) for side in zip(*parts, strict=True))
    return pack_groups(q, d, m, num_in)


def pack_groups(q: Tensor, d: Tensor, m: Tensor, num_in: int | None = None) -> Tensor:
    """q [out, in] uint8, d and m [out, in / 32] float32 -> the blob of d * q + m, d and m rounded to float16.

    `num_in` says how many of the inputs are meant where `in` was padded to whole groups.
    """
    num_out, inputs = q.shape
    groups = inputs // GROUP
    fits = q.dtype == torch.uint8 and groups * GROUP == inputs and d.shape == m.shape == (num_out, groups)
    expect(fits, "pack_groups", "q", q, f"uint8 [out, whole groups of {GROUP}] with d and m for each group")
    scales = torch.stack([d, m], 2).half()  # [out, groups, 2]
    if not scales.isfinite().all():
        size = float(torch.maximum(d.abs().amax(), m.abs().amax()))
        raise ModelFormatError(f"weights as large as {size} have no 4-bit form, which ends at 65504; use --dtype int8")
    columns = -(-num_out // LANES) * LANES
    blob = torch.zeros(HEADER_BYTES + columns // LANES * groups * CELL_BYTES, dtype=torch.uint8)
    blob[:HEADER_BYTES] = header(Q4, num_out, num_in or inputs)
    whole = num_out // PANEL * PANEL
    for start, end in ((0, whole), (whole, num_out)):
        if start == end:
            continue
        vectors = _VECTORS if start < whole else (columns - start) // LANES
        cells = blob[HEADER_BYTES + start // LANES * groups * CELL_BYTES :][
            : -(-(end - start) // LANES) * groups * CELL_BYTES
        ]
        cells = cells.view(-1, groups, vectors, CELL_BYTES)
        _fill(cells, q[start:end], scales[start:end])
    return blob


def pack_exactly(q: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """The weights d * q + m in float32 without loss: as 4-bit groups that become floats when they are multiplied, or
    packed as floats where a float16 cannot hold every d and m."""
    if all(torch.equal(side.half().float(), side) for side in (d, m)) and d.isfinite().all() and m.isfinite().all():
        blob = pack_groups(q, d, m)
        blob[:HEADER_BYTES] = header(Q4_FLOATS, *q.shape)
        return blob
    num_out, num_in = q.shape
    weights = q.view(num_out, -1, GROUP) * d[:, :, None] + m[:, :, None]
    return pack_f32(weights.view(num_out, num_in))


def unpack(blob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        cells = cells.view(groups, vectors, CELL_BYTES)
        pairs = cells[:, :, :NIBBLE_BYTES].reshape(groups, vectors, 4, LANES, 4)
        both = torch.stack([pairs & 15, pairs >> 4], 3)  # [groups, vectors, 4, 2, 16, 4]
        q.append(both.permute(1, 4, 0, 2, 3, 5).reshape(vectors * LANES, groups * GROUP))
        halves = cells[:, :, NIBBLE_BYTES:].contiguous().view(torch.float16)  # [groups, vectors, 32]
        scales.append(halves.view(groups, vectors, 2, LANES).permute(1, 3, 0, 2).reshape(vectors * LANES, groups, 2))
    d, m = torch.cat(scales)[:num_out].float().unbind(2)
    return torch.cat(q)[:num_out], d, m


def round_groups(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, d, m) for w [out, in], `in` padded to whole groups: from a group's smallest to its largest weight in 15
    steps, d and m already rounded to what is stored."""
    num_out, num_in = w.shape
    groups = -(-num_in // GROUP)
    # What is padded repeats the last weight: a zero would widen the last group.
    padding = w[:, -1:].expand(-1, groups * GROUP - num_in)
    x = torch.cat([w, padding], 1).view(num_out, groups, GROUP)
    m = x.amin(2).half().float()
    d = ((x.amax(2) - m) / 15).half().float()
    q = ((x - m[:, :, None]) / d[:, :, None].where(d[:, :, None] != 0, 1.0)).round_().clamp_(0, 15)
    return q.to(torch.uint8).view(num_out, groups * GROUP), d, m


def _fill(cells: Tensor, q: Tensor, scales: Tensor) -> None:
    """Write rows of groups into the cells [panels, groups, vectors, CELL_BYTES] of as many columns, or a few more."""
    panels, groups, vectors, _ = cells.shape
    columns, rows = panels * vectors * LANES, q.shape[0]
    if rows < columns:
        q = torch.cat([q, q.new_zeros(columns - rows, q.shape[1])])
        scales = torch.cat([scales, scales.new_zeros(columns - rows, groups, 2)])
    pairs = q.view(panels, vectors, LANES, groups, 4, 2, 4)
    packed = pairs[:, :, :, :, :, 0] | (pairs[:, :, :, :, :, 1] << 4)  # [panels, vectors, 16, groups, 4, 4]
    cells[..., :NIBBLE_BYTES].view(panels, groups, vectors, 4, LANES, 4).copy_(packed.permute(0, 3, 1, 4, 2, 5))
    ordered = scales.view(panels, vectors, LANES, groups, 2).permute(0, 3, 1, 4, 2).contiguous()
    cells[..., NIBBLE_BYTES:].copy_(ordered.view(torch.uint8).view(panels, groups, vectors, 64))
