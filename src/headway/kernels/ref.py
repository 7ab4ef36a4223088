"""The plain-torch kernel set: the oracle for every other one, and what runs where nothing faster is installed.

How it guarantees the exactness of `ops` (a row's bits depend on that row alone), each choice found by measurement:

- A matrix product runs over tiles of ROW_TILE rows, the last one padded with zeros, since the libraries below torch
  choose another order of additions for another number of rows. Should the place inside a tile matter too, which
  depends on the shape and the number of threads and is tried out once for each, that product runs on one thread.
- Attention is in `ref_kv`.
- Only functions that compute an element alike wherever it lies in a tensor are used: exp, and what IEEE 754
  rounds exactly. torch's silu and sigmoid are not among them (their loop's tail differs from its body).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.checks import Array
from headway.kernels.low_rank import LowRank, unpack_low_rank
from headway.kernels.ops import KernelSet
from headway.kernels.ref_kv import attention, soft_cap, write_kv
from headway.kernels.threads import one_thread

ROW_TILE = 16
NARROW = 16  # columns: with 5 to 11 a product's rows come out by their place in the tile, so that zeros are added
GELU_CUBE, GELU_SLOPE = 0.044715, 0.7978845608028654  # tanh(slope * (x + cube * x^3)); slope = sqrt(2 / pi)

ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def load() -> KernelSet:
    """The plain-torch kernels, on as many threads as torch was told to take."""
    return KernelSet(
        name="ref",
        layout="transposed-1",
        pack=pack,
        embed=on_arrays(embed),
        linear=on_arrays(TiledLinear()),
        rms_norm=on_arrays(rms_norm),
        rope=on_arrays(rope),
        write_kv=on_arrays(write_kv),
        attention=on_arrays(attention),
        silu_mul=on_arrays(silu_mul),
        gelu_mul=on_arrays(gelu_mul),
        soft_cap=on_arrays(soft_cap),
        layer_norm=on_arrays(layer_norm),
        gelu=on_arrays(gelu),
        adapt=adapt,
    )


def on_arrays(operation: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """An operation of tensors as one of arrays: torch computes in their memory, and nothing is copied."""

    @functools.wraps(operation, updated=())
    def run(*arguments: Any) -> Any:
        with torch.inference_mode():
            result = operation(*(torch.from_numpy(it) if isinstance(it, np.ndarray) else it for it in arguments))
        return None if result is None else result.numpy()

    return run


def pack(w: Array) -> Array:
    """[out, in] -> [in, out]: with this side contiguous a tile of 16 rows runs two to five times faster."""
    return np.ascontiguousarray(w.T)


def embed(w: Tensor, tokens: Tensor) -> Tensor:
    return w.index_select(1, tokens).t().contiguous()


class TiledLinear:
    """From its first use on, every product of one shape runs the same way: the same tile and number of threads."""

    def __init__(self) -> None:
        self._runs_alone: dict[tuple[int, int, int], bool] = {}

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out: int) -> Tensor:
        threads = torch.get_num_threads()
        key = (*w.shape, threads)
        if key not in self._runs_alone:
            self._runs_alone[key] = threads > 1 and place_matters(w)
        with one_thread(self._runs_alone[key]):
            y = _multiply(x.contiguous(), w, out)
        return y if bias is None else y.add_(bias)


def place_matters(w: Tensor) -> bool:
    """Whether equal rows of one tile come out unequal, as when threads share out the tile's rows unevenly. Seen with
    16 threads at [4864, 896]; never with one."""
    row = torch.arange(w.shape[0], dtype=torch.float32).sin_()
    y = torch.mm(row.expand(ROW_TILE, -1).contiguous(), w)
    return not torch.equal(y, y[:1].expand_as(y))


def _multiply(x: Tensor, w: Tensor, out: int) -> Tensor:
    count, width = x.shape
    if w.shape[1] < NARROW:
        w = torch.nn.functional.pad(w, (0, NARROW - w.shape[1]))
    full = count - count % ROW_TILE
    y = x.new_empty((full + ROW_TILE if full < count else full, w.shape[1]))
    for start in range(0, full, ROW_TILE):
        torch.mm(x[start : start + ROW_TILE], w, out=y[start : start + ROW_TILE])
    if full < count:
        tile = x.new_zeros((ROW_TILE, width))
        tile[: count - full] = x[full:]
        torch.mm(tile, w, out=y[full:])
    return y[:count] if w.shape[1] == out else y[:count, :out].contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart.mul_(apart.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight).add_(bias)


def gelu(x: Tensor) -> Tensor:
    # erfc(z) is a polynomial in t = 1 / (1 + 0.3275911 z) times exp(-z^2), within 2e-7.
    size = x.abs()
    z = size * 0.5**0.5
    t = (z * 0.3275911).add_(1.0).reciprocal_()
    p = torch.full_like(t, ERFC[0])
    for factor in ERFC[1:]:
        p.mul_(t).add_(factor)
    tail = (z * z).neg_().exp_().mul_(p).mul_(t).mul_(size).mul_(0.5)
    return x.clamp(min=0.0).sub_(tail)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    c = cos.index_select(0, positions).unsqueeze(1)  # [T, 1, R/2]
    s = sin.index_select(0, positions).unsqueeze(1)
    for x in (q, k):
        a, b = x[..., : 2 * cos.shape[1]].chunk(2, dim=-1)
        turned = a * c - b * s
        b.copy_(b * c + a * s)
        a.copy_(turned)


def adapt(x: Array, w: LowRank, y: Array) -> None:
    """See KernelSet.adapt. The matrices are taken apart on every call: this is for being right, not fast."""
    a, b = unpack_low_rank(w)
    with torch.inference_mode(), one_thread():
        shrunk = _multiply(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(a).t().contiguous(), w.rank)
        shrunk = shrunk * torch.from_numpy(w.scales)
        y += _multiply(shrunk, torch.from_numpy(b).t().contiguous(), w.num_out).numpy()


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.neg().exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)).
    exponent = (gate * gate).mul_(GELU_CUBE).add_(1.0).mul_(gate).mul_(-2.0 * GELU_SLOPE)
    return exponent.exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up)
