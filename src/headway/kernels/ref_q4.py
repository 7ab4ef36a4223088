"""The 4-bit product in plain torch: the oracle of the native kernel, and the fallback where there is none.

It computes with the blob of `pack_q4`, unpacked on every call. A row's bits depend on that row alone: integer sums are
exact, and the rest is elementwise but for the sum over groups, which runs in ascending order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels import pack_q4
from headway.kernels.pack import Q4, shape_of
from headway.kernels.pack_q4 import GROUP

_SMALLEST = 1e-36  # of a group's largest input; below it the group counts as zero


def quantize(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (q [T, groups, group] whole numbers in -127..127, scale [T, groups]), both float32."""
    count, num_in = x.shape
    groups = -(-num_in // group)
    x = torch.cat([x, x.new_zeros(count, groups * group - num_in)], 1).view(count, groups, group)
    size = x.abs().amax(2)
    usable = size.isfinite() & (size >= _SMALLEST)
    # A number divided by a tensor would be rounded twice: torch multiplies by the reciprocal.
    inverse = torch.where(usable, torch.div(torch.tensor(127.0), size), 0.0)
    scale = torch.where(usable, size / 127.0, 0.0).masked_fill(~size.isfinite(), float("nan"))
    return torch.where(usable[:, :, None], x * inverse[:, :, None], 0.0).round_(), scale


def linear(x: Tensor, blob: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """x [T, in] times the packed w [out, in], plus the bias."""
    weights, d, m = map(torch.from_numpy, pack_q4.unpack(blob.numpy()))
    q, scale = quantize(x)
    # Whole numbers below 2^24: float32 products and sums of them are exact in any order.
    w = weights.view(out, -1, GROUP).float()
    floors = q.sum(2) * scale
    y = x.new_zeros(x.shape[0], out) if bias is None else bias.expand(x.shape[0], out).clone()
    for group in range(w.shape[1]):
        products = torch.mm(q[:, group], w[:, group].t())
        y += products * d[:, group] * scale[:, group, None]
        y += floors[:, group, None] * m[:, group]
    return y


def embed(blob: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the packed matrix."""
    weights, d, m = map(torch.from_numpy, pack_q4.unpack(blob.numpy()))
    rows = weights[tokens].view(len(tokens), -1, GROUP) * d[tokens][:, :, None] + m[tokens][:, :, None]
    shape = shape_of(blob.numpy(), Q4)
    assert shape is not None
    return rows.flatten(1)[:, : shape[1]].contiguous()
