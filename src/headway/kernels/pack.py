"""The packed forms of a matrix that the native kernels multiply with, one per dtype.

Every level of a machine reads the same bytes, so one cache file serves every machine. A float32 matrix is its panels
and nothing else; any other form is a flat uint8 blob that begins with a 64-byte header of int64 (magic, format, out,
in, zeros), so that it describes itself. Each packer documents what follows the header. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.checks import expect

PANEL = 48
"""Columns of the product (rows of the matrix) that lie together."""

LANES = 16
HEADER_BYTES = 64
MAGIC = int.from_bytes(b"HWMATRX1", "little")
GROUP_I8 = 64
SMALLEST = 1e-36
"""The largest of some values below which they are zeros; 127 divided by it is still finite."""

F32, BF16, I8, Q4, Q4_FLOATS = range(5)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a dtype is packed. `number` is the format's number on the C side."""

    number: int
    layout: str
    """Names the form and its version; part of the weight cache's key."""

    pack: Callable[[Tensor], Tensor]
    pack_table: Callable[[Tensor], Tensor] | None = None  # as in KernelSet
    pack_groups: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # as in KernelSet


def pack_f32(w: Tensor) -> Tensor:
    """w [out, in] -> a tensor of the same shape and size whose memory is in panel order; only kernels can read it.

    Panels of 48 rows of w, the last one with what is left, each stored input by input:
    w[0..47, 0], w[0..47, 1], ..., w[0..47, in-1], w[48..95, 0], ...
    """
    _expect_matrix(w)
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
    _expect_matrix(w)
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


def unpack_bf16(blob: Tensor) -> Tensor:
    """The other way: float32 [out, in]; for the oracle and tests."""
    num_out, num_in = _expect_blob(blob, BF16)
    inputs = _up(num_in, 2)
    values = blob[HEADER_BYTES:].view(torch.bfloat16)
    return _rows_of(values, num_out, inputs, 2)[:, :num_in].float()


def pack_i8(w: Tensor) -> Tensor:
    """w [out, in] -> the blob of one scale and one row of small integers for each row of w.

    Row n is scale[n] * q, q in -127..127 and rounded half to even. Scales, float32, then panels of [inputs / 4,
    48 columns, 4] bytes q + 128; columns are padded to a multiple of 16 and inputs to one of 64.
    """
    _expect_matrix(w)
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


def unpack_i8(blob: Tensor) -> tuple[Tensor, Tensor]:
    """The other way: (scale [out], whole numbers as float32 [out, in padded to groups]); for the oracle and tests."""
    num_out, num_in = _expect_blob(blob, I8)
    columns, inputs = _up(num_out, LANES), _up(num_in, GROUP_I8)
    scale = blob[HEADER_BYTES : HEADER_BYTES + 4 * num_out].view(torch.float32)
    return scale, _rows_of(blob[HEADER_BYTES + 4 * columns :], num_out, inputs, 4).float().sub_(128.0)


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


def shape_of(blob: Tensor, packing: int) -> tuple[int, int] | None:
    """(out, in) of a blob, or None where it is not one of this format."""
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() < HEADER_BYTES:
        return None
    magic, number, num_out, num_in = blob[:32].view(torch.int64).tolist()
    return (num_out, num_in) if (magic, number) == (MAGIC, packing) else None


def format_of(blob: Tensor) -> int | None:
    """The number of a blob's format, or None where it is no blob."""
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() < HEADER_BYTES:
        return None
    magic, number = blob[:16].view(torch.int64).tolist()
    return int(number) if magic == MAGIC else None


def _rows_of(panels: Tensor, num_out: int, inputs: int, together: int) -> Tensor:
    """[out, inputs] from panels of [inputs / together, columns, together]."""
    columns = _up(num_out, LANES)
    rows = [
        panels[column * inputs : (column + PANEL) * inputs]
        .view(inputs // together, min(PANEL, columns - column), together)
        .transpose(0, 1)
        .reshape(-1, inputs)
        for column in range(0, columns, PANEL)
    ]
    return torch.cat(rows)[:num_out]


def _expect_blob(blob: Tensor, number: int) -> tuple[int, int]:
    shape = shape_of(blob, number)
    expect(shape is not None, "unpack", "blob", blob, f"a matrix packed in format {number}")
    assert shape is not None
    return shape


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _expect_matrix(w: Tensor) -> None:
    expect(w.dim() == 2 and w.dtype == torch.float32, "pack", "w", w, "float32 [out, in]")
