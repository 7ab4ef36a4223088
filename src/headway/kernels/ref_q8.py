"""The product with 8-bit groups in plain torch: the oracle of the native kernel, and the fallback where there is none.

It computes with the blob of `pack_q8`, unpacked on every call. A row's bits depend on that row alone, as in `ref_q4`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels import pack_q8
from headway.kernels.pack_q8 import GROUP
from headway.kernels.ref_q4 import quantize


def linear(x: Tensor, blob: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """x [T, in] times the packed w [out, in], plus the bias."""
    whole, d, m = _unpacked(blob)
    q, scale = quantize(x, GROUP)
    w = whole.view(out, -1, GROUP)
    y = x.new_zeros(x.shape[0], out) if bias is None else bias.expand(x.shape[0], out).clone()
    for group in range(w.shape[1]):
        # Whole numbers below 2^24: float32 products and sums of them are exact in any order.
        y += torch.mm(q[:, group], w[:, group].t()) * d[:, group] * scale[:, group, None]
        if m is not None:
            y += (q[:, group].sum(1) * scale[:, group])[:, None] * m[:, group]
    return y


def embed(blob: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the packed matrix."""
    whole, d, m = _unpacked(blob)
    rows = whole[tokens].view(len(tokens), -1, GROUP) * d[tokens][:, :, None]
    return (rows if m is None else rows + m[tokens][:, :, None]).flatten(1)


def _unpacked(blob: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Whole numbers as floats, their steps and, where the format has them, floors."""
    q, d, m = pack_q8.unpack(blob.numpy())
    whole = torch.from_numpy(q).float()
    if m is None:
        return whole.sub_(128), torch.from_numpy(d), None
    return whole, torch.from_numpy(d), torch.from_numpy(m)
