"""The packed forms of a matrix that the native kernels multiply with, one per dtype.

Every level of a machine reads the same bytes, so one cache file serves every machine. A float32 matrix is its panels
and nothing else; any other form is a flat uint8 blob that begins with a 64-byte header of int64 (magic, format, out,
in, zeros), so that it describes itself. Each packer documents what follows the header. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.kernels.checks import Array, expect

PANEL = 48
"""Columns of the product (rows of the matrix) that lie together."""

LANES = 16
HEADER_BYTES = 64
MAGIC = int.from_bytes(b"HWMATRX1", "little")
GROUP_I8 = 64
SMALLEST = 1e-36
"""The largest of some values below which they are zeros; 127 divided by it is still finite."""

F32, BF16, I8, Q4, Q4_FLOATS, Q4_WIDE, Q8, Q8_FLOORS = range(8)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a dtype is packed. `number` is the format's number on the C side."""

    number: int
    layout: str
    """Names the form and its version; part of the weight cache's key."""

    pack: Callable[[Array], Array]
    pack_table: Callable[[Array], Array] | None = None  # as in KernelSet
    pack_groups: Callable[[Array, Array, Array], Array] | None = None  # as in KernelSet
    pack_bytes: Callable[[Array, Array, Array | None], Array] | None = None  # as in KernelSet


def pack_f32(w: Array) -> Array:
    """w [out, in] -> an array of the same shape and size whose memory is in panel order; only kernels can read it.

    Panels of 48 rows of w, the last one with what is left, each stored input by input:
    w[0..47, 0], w[0..47, 1], ..., w[0..47, in-1], w[48..95, 0], ...
    """
    _expect_matrix(w)
    num_out, num_in = w.shape
    packed = np.empty(num_out * num_in, np.float32)
    for column in range(0, num_out, PANEL):
        rows = w[column : column + PANEL]
        packed[column * num_in :][: rows.size].reshape(num_in, len(rows))[...] = rows.T
    return packed.reshape(num_out, num_in)


def pack_bf16(w: Array) -> Array:
    """w [out, in] -> the blob of its values as bfloat16, rounded half to even.

    Panels of [inputs / 2, 48 columns, 2] values; columns are padded to a multiple of 16 and an odd number of inputs by
    one.
    """
    _expect_matrix(w)
    num_out, num_in = w.shape
    columns, inputs = _up(num_out, LANES), _up(num_in, 2)
    blob = np.zeros(HEADER_BYTES + columns * inputs * 2, np.uint8)
    blob[:HEADER_BYTES] = header(BF16, num_out, num_in)
    panels = blob[HEADER_BYTES:].view(np.uint32)  # pairs of inputs
    for column in range(0, num_out, PANEL):
        rows, width = w[column : column + PANEL], min(PANEL, columns - column)
        panel = np.zeros((width, inputs), np.uint16)
        panel[: len(rows), :num_in] = _to_bf16(rows)
        _store(panels, panel, column * inputs)
    return blob


def unpack_bf16(blob: Array) -> Array:
    """The other way: float32 [out, in]; for the oracle and tests."""
    num_out, num_in = _expect_blob(blob, BF16)
    inputs = _up(num_in, 2)
    values = _rows_of(blob[HEADER_BYTES:].view(np.uint16), num_out, inputs, 2)[:, :num_in]
    return (values.astype(np.uint32) << 16).view(np.float32)


def pack_i8(w: Array) -> Array:
    """w [out, in] -> the blob of one scale and one row of small integers for each row of w.

    Row n is scale[n] * q, q in -127..127 and rounded half to even. Scales, float32, then panels of [inputs / 4,
    48 columns, 4] bytes q + 128; columns are padded to a multiple of 16 and inputs to one of 64.
    """
    _expect_matrix(w)
    num_out, num_in = w.shape
    columns, inputs = _up(num_out, LANES), _up(num_in, GROUP_I8)
    blob = np.zeros(HEADER_BYTES + columns * (4 + inputs), np.uint8)
    blob[:HEADER_BYTES] = header(I8, num_out, num_in)
    scales = blob[HEADER_BYTES : HEADER_BYTES + 4 * columns].view(np.float32)
    panels = blob[HEADER_BYTES + 4 * columns :].view(np.uint32)  # four inputs each
    for column in range(0, num_out, PANEL):
        rows, width = w[column : column + PANEL], min(PANEL, columns - column)
        scale, whole = quantize_rows(rows)
        scales[column : column + len(rows)] = scale
        panel = np.full((width, inputs), 128, np.uint8)
        whole += np.float32(128)
        whole[np.isnan(whole)] = 0  # of a row that is not finite: what a cast makes of these is the machine's choice
        panel[: len(rows), :num_in] = whole
        _store(panels, panel, column * inputs)
    return blob


def unpack_i8(blob: Array) -> tuple[Array, Array]:
    """The other way: (scale [out], whole numbers as float32 [out, in padded to groups]); for the oracle and tests."""
    num_out, num_in = _expect_blob(blob, I8)
    columns, inputs = _up(num_out, LANES), _up(num_in, GROUP_I8)
    scale = blob[HEADER_BYTES : HEADER_BYTES + 4 * num_out].view(np.float32)
    whole = _rows_of(blob[HEADER_BYTES + 4 * columns :], num_out, inputs, 4).astype(np.float32)
    return scale, whole - np.float32(128)


def quantize_rows(w: Array) -> tuple[Array, Array]:
    """(scale [rows], whole numbers in -127..127 as float32 [rows, in]) for w [rows, in], rounded half to even.

    A row that is zero, or too small to divide by, has scale 0."""
    size = np.abs(w).max(1)
    usable = size >= SMALLEST
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # 127 times the reciprocal, each rounded, and not 127 / size: files in caches were made so.
        inverse = np.where(usable, np.float32(127) * (np.float32(1) / size), np.float32(0))
        whole = w * inverse[:, None]
    return np.where(usable, size / np.float32(127), np.float32(0)), np.rint(whole, out=whole)


def header(packing: int, num_out: int, num_in: int) -> Array:
    """The first 64 bytes of a blob."""
    return np.array([MAGIC, packing, num_out, num_in, 0, 0, 0, 0], np.int64).view(np.uint8)


def shape_of(blob: Array, packing: int) -> tuple[int, int] | None:
    """(out, in) of a blob, or None where it is not one of this format."""
    if blob.dtype != np.uint8 or blob.ndim != 1 or blob.size < HEADER_BYTES:
        return None
    magic, number, num_out, num_in = blob[:32].view(np.int64).tolist()
    return (num_out, num_in) if (magic, number) == (MAGIC, packing) else None


def format_of(blob: Array) -> int | None:
    """The number of a blob's format, or None where it is no blob."""
    if blob.dtype != np.uint8 or blob.ndim != 1 or blob.size < HEADER_BYTES:
        return None
    magic, number = blob[:16].view(np.int64).tolist()
    return int(number) if magic == MAGIC else None


def _to_bf16(x: Array) -> Array:
    """The upper halves of floats, rounded half to even, as uint16."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    rounded[np.isnan(x)] = 0xFFFF
    return rounded.astype(np.uint16)


def _store(panels: Array, panel: Array, start: int) -> None:
    """Write a panel [columns, inputs] of values as words of four bytes, word by word of each column.

    `panels` are the words of the matrix, `start` the number of values before this panel."""
    words = panel.view(np.uint32)
    per_word = 4 // panel.itemsize
    panels[start // per_word :][: words.size].reshape(words.shape[1], words.shape[0])[...] = words.T


def _rows_of(panels: Array, num_out: int, inputs: int, together: int) -> Array:
    """[out, inputs] from panels of [inputs / together, columns, together]."""
    columns = _up(num_out, LANES)
    rows = [
        panels[column * inputs : (column + PANEL) * inputs]
        .reshape(inputs // together, min(PANEL, columns - column), together)
        .transpose(1, 0, 2)
        .reshape(-1, inputs)
        for column in range(0, columns, PANEL)
    ]
    return np.concatenate(rows)[:num_out]


def _expect_blob(blob: Array, number: int) -> tuple[int, int]:
    shape = shape_of(blob, number)
    expect(shape is not None, "unpack", "blob", blob, f"a matrix packed in format {number}")
    assert shape is not None
    return shape


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _expect_matrix(w: Array) -> None:
    expect(w.ndim == 2 and w.dtype == np.float32, "pack", "w", w, "float32 [out, in]")
