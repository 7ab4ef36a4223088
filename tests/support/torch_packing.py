"""Packing and rotary tables in plain torch: the oracle of `pack`, `pack_q4` and `rope`, which do without it.

Caches hold files with these bytes, and checkpoints were made with these tables: neither may change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.kernels.pack import BF16, GROUP_I8, HEADER_BYTES, I8, LANES, MAGIC, PANEL, Q4, Q4_FLOATS, Q4_WIDE, SMALLEST
from headway.kernels.pack_q4 import GROUP, NIBBLE_BYTES
from headway.layers.rope import RopeScalingLike


def pack_f32(w: Tensor) -> Tensor:
    """w [out, in] -> a tensor of the same shape and size whose memory is in panel order; only kernels can read it.

    Panels of 48 rows of w, the last one with what is left, each stored input by input:
    w[0..47, 0], w[0..47, 1], ..., w[0..47, in-1], w[48..95, 0], ...
    """
    num_out, num_in = w.shape
    whole = num_out // PANEL * PANEL
    packed = torch.empty(num_out * num_in)
    head, tail = packed[: whole * num_in], packed[whole * num_in :]
    head.view(whole // PANEL, num_in, PANEL).copy_(w[:whole].view(whole // PANEL, PANEL, num_in).transpose(1, 2))
    tail.view(num_in, num_out - whole).copy_(w[whole:].t())
    return packed.view(num_out, num_in)


def pack_bf16(w: Tensor) -> Tensor:
    """w [out, in] -> the blob of its values as bfloat16, rounded half to even.

    Panels of [inputs / 2, 48 columns, 2] values; columns are padded to a multiple of 16 and an odd number of inputs by
    one.
    """
    num_out, num_in = w.shape
    columns, inputs = _up(num_out, LANES), _up(num_in, 2)
    blob = torch.zeros(HEADER_BYTES + columns * inputs * 2, dtype=torch.uint8)
    blob[:HEADER_BYTES] = header(BF16, num_out, num_in)
    panels = blob[HEADER_BYTES:].view(torch.bfloat16)
    for column in range(0, num_out, PANEL):
        rows, width = w[column : column + PANEL], min(PANEL, columns - column)
        panel = torch.zeros((width, inputs), dtype=torch.bfloat16)
        panel[: rows.shape[0], :num_in] = rows
        part = panels[column * inputs : (column + width) * inputs]
        part.view(inputs // 2, width, 2).copy_(panel.view(width, inputs // 2, 2).transpose(0, 1))
    return blob


def pack_i8(w: Tensor) -> Tensor:
    """w [out, in] -> the blob of one scale and one row of small integers for each row of w.

    Row n is scale[n] * q, q in -127..127 and rounded half to even. Scales, float32, then panels of [inputs / 4,
    48 columns, 4] bytes q + 128; columns are padded to a multiple of 16 and inputs to one of 64.
    """
    num_out, num_in = w.shape
    columns, inputs = _up(num_out, LANES), _up(num_in, GROUP_I8)
    blob = torch.zeros(HEADER_BYTES + columns * (4 + inputs), dtype=torch.uint8)
    blob[:HEADER_BYTES] = header(I8, num_out, num_in)
    scales = blob[HEADER_BYTES : HEADER_BYTES + 4 * columns].view(torch.float32)
    panels = blob[HEADER_BYTES + 4 * columns :]
    for column in range(0, num_out, PANEL):
        rows, width = w[column : column + PANEL], min(PANEL, columns - column)
        scale, whole = quantize_rows(rows)
        scales[column : column + rows.shape[0]] = scale
        panel = torch.full((width, inputs), 128, dtype=torch.uint8)
        panel[: rows.shape[0], :num_in] = whole.add_(128)
        part = panels[column * inputs : (column + width) * inputs]
        part.view(inputs // 4, width, 4).copy_(panel.view(width, inputs // 4, 4).transpose(0, 1))
    return blob


def quantize_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """(scale [rows], whole numbers in -127..127 as float32 [rows, in]) for w [rows, in], rounded half to even.

    A row that is zero, or too small to divide by, has scale 0."""
    size = w.abs().amax(1)
    usable = size >= SMALLEST
    inverse = torch.where(usable, 127.0 / size, 0.0)
    return torch.where(usable, size / 127.0, 0.0), (w * inverse[:, None]).round_()


def header(packing: int, num_out: int, num_in: int) -> Tensor:
    """The first 64 bytes of a blob."""
    return torch.tensor([MAGIC, packing, num_out, num_in, 0, 0, 0, 0], dtype=torch.int64).view(torch.uint8)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pack_q4(w: Tensor) -> Tensor:
    """w [out, in] -> the blob of the nearest groups."""
    num_in = w.shape[1]
    return pack_groups(*round_groups(w), num_in)


def pack_groups(q: Tensor, d: Tensor, m: Tensor, num_in: int | None = None) -> Tensor:
    """q [out, in] uint8, d and m [out, in / 32] float32 -> the blob of d * q + m, d and m rounded to float16.

    `num_in` says how many of the inputs are meant where `in` was padded to whole groups.
    """
    num_out, inputs = q.shape
    return _groups(q, torch.stack([d, m], 2).half(), header(Q4, num_out, num_in or inputs))


def _groups(q: Tensor, scales: Tensor, first: Tensor) -> Tensor:
    """The blob of q [out, in] with scales [out, groups, 2], halves or floats."""
    num_out, groups, _ = scales.shape
    cell_bytes = NIBBLE_BYTES + 32 * scales.element_size()
    columns = -(-num_out // LANES) * LANES
    blob = torch.zeros(HEADER_BYTES + columns // LANES * groups * cell_bytes, dtype=torch.uint8)
    blob[:HEADER_BYTES] = first
    whole = num_out // PANEL * PANEL
    for start, end in ((0, whole), (whole, num_out)):
        if start == end:
            continue
        vectors = PANEL // LANES if start < whole else (columns - start) // LANES
        cells = blob[HEADER_BYTES + start // LANES * groups * cell_bytes :][
            : -(-(end - start) // LANES) * groups * cell_bytes
        ]
        cells = cells.view(-1, groups, vectors, cell_bytes)
        _fill(cells, q[start:end], scales[start:end])
    return blob


def pack_exactly(q: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """The weights d * q + m in float32 without loss: as 4-bit groups that become floats when they are multiplied, or
    packed as floats where they are not finite."""
    if all(torch.equal(side.half().float(), side) for side in (d, m)) and d.isfinite().all() and m.isfinite().all():
        blob = pack_groups(q, d, m)
        blob[:HEADER_BYTES] = header(Q4_FLOATS, *q.shape)
        return blob
    if d.isfinite().all() and m.isfinite().all():
        return _groups(q, torch.stack([d, m], 2), header(Q4_WIDE, *q.shape))
    num_out, num_in = q.shape
    weights = q.view(num_out, -1, GROUP) * d[:, :, None] + m[:, :, None]
    return pack_f32(weights.view(num_out, num_in))


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
    """Write rows of groups into the cells [panels, groups, vectors, bytes] of as many columns, or a few more."""
    panels, groups, vectors, _ = cells.shape
    columns, rows = panels * vectors * LANES, q.shape[0]
    if rows < columns:
        q = torch.cat([q, q.new_zeros(columns - rows, q.shape[1])])
        scales = torch.cat([scales, scales.new_zeros(columns - rows, groups, 2)])
    pairs = q.view(panels, vectors, LANES, groups, 4, 2, 4)
    packed = pairs[:, :, :, :, :, 0] | (pairs[:, :, :, :, :, 1] << 4)  # [panels, vectors, 16, groups, 4, 4]
    cells[..., :NIBBLE_BYTES].view(panels, groups, vectors, 4, LANES, 4).copy_(packed.permute(0, 3, 1, 4, 2, 5))
    ordered = scales.view(panels, vectors, LANES, groups, 2).permute(0, 3, 1, 4, 2).contiguous()
    cells[..., NIBBLE_BYTES:].copy_(ordered.view(torch.uint8).view(panels, groups, vectors, -1))


def rope_table(head_dim: int, max_len: int, theta: float, stretch: RopeScalingLike | None) -> tuple[Tensor, Tensor]:
    freqs = _frequencies(head_dim, theta, stretch)
    angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(1) * freqs
    wide = angles.double()
    return wide.cos().float(), wide.sin().float()


def _powers(theta: float, exponents: Tensor) -> Tensor:
    """As torch gives them with AVX-512: 32 at once, what is left over one by one, which rounds some differently.

    With AVX2 it takes 16 at once, so that the left over ones begin elsewhere.
    """
    num_vectors = len(exponents) // 32 * 32
    left_over = [theta**exponent for exponent in exponents[num_vectors:].split(1)]
    return torch.cat([theta ** exponents[:num_vectors], *left_over])


def _frequencies(head_dim: int, theta: float, stretch: RopeScalingLike | None) -> Tensor:
    freqs = 1.0 / _powers(theta, torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if stretch is None:
        return freqs
    if stretch.kind == "linear":
        return freqs / stretch.factor
    assert stretch.kind == "llama3", stretch.kind
    waves = 2 * math.pi / freqs
    low, high = stretch.low_freq_factor, stretch.high_freq_factor
    # 0: slow, divided by the factor; 1: fast, untouched; between them a blend.
    keep = ((stretch.original_max_len / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * freqs / stretch.factor + keep * freqs
