"""Matrices for the native kernels: multiplied and looked up in. How they are packed is in `pack`."""

from __future__ import annotations

import ctypes

import numpy as np

from headway.kernels import pack_q4, pack_q8
from headway.kernels.checks import Array, address, expect, in_range, is_flat, is_index, is_rows, stride
from headway.kernels.library import Context
from headway.kernels.pack import F32, GROUP_I8, HEADER_BYTES, I8, Q4, Q8, Packing, shape_of


class NativeLinear:
    """Takes weights as `packing` leaves them, and no others."""

    def __init__(self, context: Context, packing: Packing) -> None:
        self._context = context
        self._call = context.call
        self._packing = packing

    def linear(self, x: Array, w: Array, bias: Array | None, out: int) -> Array:
        """See KernelSet.linear; w is packed."""
        rows, num_in = x.shape
        expect(is_rows(x), "linear", "x", x, "float32 [T, in] with contiguous rows")
        number = self._format("linear", w)
        if bias is not None:
            expect(is_flat(bias) and bias.shape == (out,), "linear", "bias", bias, f"float32 [{out}]")
        y = np.empty((rows, out), np.float32)
        status = self._call["gemm"](
            *(address(x), rows, num_in, stride(x), address(w), number, w.nbytes, out),
            *(None if bias is None else address(bias), address(y)),
        )
        expect(status == 0, "linear", "w", w, f"[{out}, {num_in}] packed as {self._packing.layout}")
        return y

    def embed(self, w: Array, tokens: Array) -> Array:
        """See KernelSet.embed; w is packed."""
        expect(is_index(tokens, np.int64), "embed", "tokens", tokens, "contiguous int64 [T]")
        number = self._format("embed", w)
        num_out, num_in = self._shape(w, number)
        y = np.empty((tokens.shape[0], num_in), np.float32)
        status = self._call["embed"](
            *(address(w), number, w.nbytes, num_out, num_in),
            *(address(tokens), tokens.shape[0], address(y)),
        )
        expect(status != 2, "embed", "w", w, f"packed as {self._packing.layout}")
        in_range(status, "embed", f"a token is outside 0..{num_out - 1}")
        return y

    def quantize(self, x: Array, group: int) -> Array:
        """The records [T, bytes] that `linear` makes of its inputs, each group of so many; here to be tested."""
        rows, num_in = x.shape
        expect(is_rows(x), "quantize", "x", x, "float32 [T, in] with contiguous rows")
        groups = -(-num_in // group)
        records = np.zeros((rows, -(-groups * (group + 8) // 64) * 64), np.uint8)
        number = {GROUP_I8: I8, pack_q4.GROUP: Q4, pack_q8.GROUP: Q8}[group]
        self._call["quantize"](address(x), rows, num_in, stride(x), number, address(records))
        return records

    def _format(self, kernel: str, w: Array) -> int:
        """Its format's number. Dtype and rank are checked; size and header are left to the kernels."""
        number, is_blob = self._packing.number, w.dtype == np.uint8
        fits = w.ndim == 1 if is_blob else number == F32 and is_flat(w) and w.ndim == 2
        expect(fits and w.flags.c_contiguous, kernel, "w", w, f"a matrix packed as {self._packing.layout}")
        if is_blob and self._packing.pack_table is not None and w.nbytes >= HEADER_BYTES:
            number = ctypes.c_int32.from_address(address(w) + 8).value  # several forms, and the blob says which
        return number

    def _shape(self, w: Array, number: int) -> tuple[int, int]:
        if number == F32:
            return w.shape[0], w.shape[1]
        shape = shape_of(w, number)
        expect(shape is not None, "embed", "w", w, f"packed as {self._packing.layout}")
        assert shape is not None
        return shape
