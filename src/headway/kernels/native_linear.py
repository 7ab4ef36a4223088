"""Matrices for the native kernels: multiplied and looked up in. How they are packed is in `pack`."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.checks import expect, in_range, is_flat, is_index, is_rows
from headway.kernels.library import Context
from headway.kernels.pack import F32, Packing, shape_of


class NativeLinear:
    """Takes weights as `packing` leaves them, and no others."""

    def __init__(self, context: Context, packing: Packing) -> None:
        self._context = context
        self._call = context.call
        self._packing = packing

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """See KernelSet.linear; w is packed."""
        rows, num_in = x.shape
        expect(is_rows(x), "linear", "x", x, "float32 [T, in] with contiguous rows")
        self._expect_packed("linear", w)
        if bias is not None:
            expect(is_flat(bias) and bias.shape == (out,), "linear", "bias", bias, f"float32 [{out}]")
        y = torch.empty(rows, out)
        status = self._call["gemm"](
            *(x.data_ptr(), rows, num_in, x.stride(0), w.data_ptr(), self._packing.number, w.nbytes, out),
            *(None if bias is None else bias.data_ptr(), y.data_ptr()),
        )
        expect(status == 0, "linear", "w", w, f"[{out}, {num_in}] packed as {self._packing.layout}")
        return y

    def embed(self, w: Tensor, tokens: Tensor) -> Tensor:
        """See KernelSet.embed; w is packed."""
        expect(is_index(tokens, torch.int64), "embed", "tokens", tokens, "contiguous int64 [T]")
        self._expect_packed("embed", w)
        num_out, num_in = self._shape(w)
        y = torch.empty(tokens.shape[0], num_in)
        status = self._call["embed"](
            *(w.data_ptr(), self._packing.number, w.nbytes, num_out, num_in),
            *(tokens.data_ptr(), tokens.shape[0], y.data_ptr()),
        )
        expect(status != 2, "embed", "w", w, f"packed as {self._packing.layout}")
        in_range(status, "embed", f"a token is outside 0..{num_out - 1}")
        return y

    def _expect_packed(self, kernel: str, w: Tensor) -> None:
        """Its dtype and rank; size and header are checked by the kernels."""
        floats = self._packing.number == F32
        fits = is_flat(w) and w.dim() == 2 if floats else w.dtype == torch.uint8 and w.dim() == 1 and w.is_cpu
        expect(fits and w.is_contiguous(), kernel, "w", w, f"a matrix packed as {self._packing.layout}")

    def _shape(self, w: Tensor) -> tuple[int, int]:
        if self._packing.number == F32:
            return w.shape[0], w.shape[1]
        shape = shape_of(w, self._packing.number)
        expect(shape is not None, "embed", "w", w, f"packed as {self._packing.layout}")
        assert shape is not None
        return shape
