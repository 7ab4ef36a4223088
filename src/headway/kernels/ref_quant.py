"""Plain-torch kernels for every number format of matrices: the oracle of the native ones.

They take the same blobs, so a cache file made for one serves the other, and take them apart on every call: this is for
being right, not fast. A row's bits depend on that row alone: floats go through the tiles of `ref`; sums of small
integers are exact, and what follows them is elementwise, group after group in ascending order.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.kernels import pack, ref, ref_q4, ref_q8
from headway.kernels.checks import expect
from headway.kernels.ops import KernelSet
from headway.kernels.packings import PACKINGS


def load(dtype: str = "float32", threads: int | None = None) -> KernelSet:
    """The plain-torch kernels for matrices of this dtype; torch takes so many `threads` from here on."""
    if dtype not in PACKINGS:
        raise ConfigError(f"kernel dtype is {dtype!r}; allowed are {', '.join(PACKINGS)}")
    if threads is not None:
        torch.set_num_threads(threads)
    floats = ref.load()
    if dtype == "float32":
        return floats
    packing = PACKINGS[dtype]
    return dataclasses.replace(
        floats,
        layout=packing.layout,
        pack=packing.pack,
        embed=ref.on_arrays(embed),
        linear=ref.on_arrays(BlobLinear()),
        pack_table=packing.pack_table,
        pack_groups=packing.pack_groups,
        pack_bytes=packing.pack_bytes,
    )


class BlobLinear:
    """Multiplies with whatever a blob says it is."""

    def __init__(self) -> None:
        self._floats = ref.TiledLinear()

    def __call__(self, x: Tensor, blob: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """See KernelSet.linear."""
        number = pack.format_of(blob.numpy())
        if number == pack.BF16:
            return self._floats(x, torch.from_numpy(pack.unpack_bf16(blob.numpy())).t().contiguous(), bias, out)
        if number == pack.I8:
            return linear_i8(x, blob, bias)
        if number in (pack.Q8, pack.Q8_FLOORS):
            return ref_q8.linear(x, blob, bias, out)
        expect(number == pack.Q4, "linear", "w", blob.numpy(), "a packed matrix")
        return ref_q4.linear(x, blob, bias, out)


def linear_i8(x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times the packed w [out, in], plus the bias."""
    scale, whole = map(torch.from_numpy, pack.unpack_i8(blob.numpy()))
    w = whole.view(len(scale), -1, pack.GROUP_I8)
    q, steps = ref_q4.quantize(x, pack.GROUP_I8)
    y = x.new_zeros(x.shape[0], len(scale))
    for group in range(w.shape[1]):
        # Whole numbers below 2^24: float32 products and sums of them are exact in any order.
        y += (q[:, group] @ w[:, group].t()).mul_(steps[:, group, None])
    y *= scale
    return y if bias is None else y.add_(bias)


def embed(blob: Tensor, tokens: Tensor) -> Tensor:
    """See KernelSet.embed."""
    number = pack.format_of(blob.numpy())
    if number == pack.BF16:
        return torch.from_numpy(pack.unpack_bf16(blob.numpy()))[tokens]
    if number == pack.I8:
        shape = pack.shape_of(blob.numpy(), pack.I8)
        assert shape is not None
        scale, whole = map(torch.from_numpy, pack.unpack_i8(blob.numpy()))
        return whole[tokens, : shape[1]].mul_(scale[tokens, None])
    if number in (pack.Q8, pack.Q8_FLOORS):
        return ref_q8.embed(blob, tokens)
    expect(number == pack.Q4, "embed", "w", blob.numpy(), "a packed matrix")
    return ref_q4.embed(blob, tokens)
