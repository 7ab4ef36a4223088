"""Matrices for the native kernels: how they are packed, multiplied and looked up in."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.checks import expect, in_range, is_flat, is_index, is_rows
from headway.kernels.library import Context

LAYOUT = "panel48-f32-1"
"""Weights as `pack` leaves them: the same bytes for every level, so one cache file serves every machine."""

PANEL = 48


def pack(w: Tensor) -> Tensor:
    """w [out, in] -> a tensor of the same shape and size whose memory is in panel order; only kernels can read it.

    Panels of 48 rows of w, the last one with what is left, each stored input by input:
    w[0..47, 0], w[0..47, 1], ..., w[0..47, in-1], w[48..95, 0], ...
    """
    expect(w.dim() == 2 and w.dtype == torch.float32, "pack", "w", w, "float32 [out, in]")
    num_out, num_in = w.shape
    whole = num_out // PANEL * PANEL
    packed = torch.empty(num_out * num_in)
    head, tail = packed[: whole * num_in], packed[whole * num_in :]
    head.view(whole // PANEL, num_in, PANEL).copy_(w[:whole].view(whole // PANEL, PANEL, num_in).transpose(1, 2))
    tail.view(num_in, num_out - whole).copy_(w[whole:].t())
    return packed.view(num_out, num_in)


class NativeLinear:
    """Takes weights as `pack` leaves them, and no others."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._call = context.call

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """See KernelSet.linear; w is as `pack` leaves it."""
        rows, num_in = x.shape
        expect(is_rows(x), "linear", "x", x, "float32 [T, in] with contiguous rows")
        expect(is_flat(w) and w.shape == (out, num_in), "linear", "w", w, f"packed float32 [{out}, {num_in}]")
        if bias is not None:
            expect(is_flat(bias) and bias.shape == (out,), "linear", "bias", bias, f"float32 [{out}]")
        y = torch.empty(rows, out)
        bias_at = None if bias is None else bias.data_ptr()
        self._call["gemm"](x.data_ptr(), rows, num_in, x.stride(0), w.data_ptr(), out, bias_at, y.data_ptr())
        return y

    def embed(self, w: Tensor, tokens: Tensor) -> Tensor:
        """See KernelSet.embed; w is as `pack` leaves it."""
        expect(is_flat(w) and w.dim() == 2, "embed", "w", w, "packed float32 [out, in]")
        expect(is_index(tokens, torch.int64), "embed", "tokens", tokens, "contiguous int64 [T]")
        num_out, num_in = w.shape
        y = torch.empty(tokens.shape[0], num_in)
        status = self._call["embed"](w.data_ptr(), num_out, num_in, tokens.data_ptr(), tokens.shape[0], y.data_ptr())
        in_range(status, "embed", f"a token is outside 0..{num_out - 1}")
        return y
