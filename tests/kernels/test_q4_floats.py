"""Float32 matrices kept as 4-bit groups: bit for bit what the same weights give as floats, at every level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.kernels import native
from headway.kernels import pack as pack_arrays
from headway.kernels import pack_q4 as pack_q4_arrays
from headway.kernels.ops import KernelSet
from headway.kernels.packings import is_blob as is_array_blob
from torch_kernels import Tensors, of_tensors, on_tensors

pack_q4 = Tensors(pack_q4_arrays)
pack_f32 = on_tensors(pack_arrays.pack_f32)
is_blob = on_tensors(is_array_blob)

SHAPES = [(576, 576), (70, 96), (48, 32), (97, 1600), (16, 64), (5, 128), (33, 544), (960, 576)]  # (out, in)


@pytest.fixture
def sets(levels: list[str], library: Path | None) -> list[KernelSet]:
    torch.manual_seed(5)
    found = [native.load(threads, level, library) for level in levels for threads in (1, 2)]
    return [of_tensors(kernels) for kernels in found if kernels is not None]


def random_groups(out: int, num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randint(16, (out, num_in), dtype=torch.uint8)
    return q, torch.randn(out, num_in // 32).half().float(), torch.randn(out, num_in // 32).half().float()


def weights_of(q: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return q * d.repeat_interleave(32, 1) + m.repeat_interleave(32, 1)


@pytest.mark.parametrize(("out", "num_in"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 21, 64, 65, 130])
def test_products_have_the_bits_of_the_float_matrix(out: int, num_in: int, rows: int, sets: list[KernelSet]) -> None:
    groups = random_groups(out, num_in)
    blob, floats = pack_q4.pack_exactly(*groups), pack_f32(weights_of(*groups))
    assert is_blob(blob, out, num_in)
    assert blob.nbytes < floats.nbytes / 4 or out < 16
    x, bias = torch.randn(rows, num_in), torch.randn(out)
    for kernels in sets:
        for given in (None, bias):
            got, wanted = (kernels.linear(x, w, given, out) for w in (blob, floats))
            assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), kernels.name


def test_rows_looked_up_are_the_weights(sets: list[KernelSet]) -> None:
    groups = random_groups(100, 64)
    blob = pack_q4.pack_exactly(*groups)
    for kernels in sets:
        assert torch.equal(kernels.embed(blob, torch.tensor([0, 99, 48, 7])), weights_of(*groups)[[0, 99, 48, 7]])


@pytest.mark.parametrize("spoil", [lambda d: d * 1.0001, lambda d: d * 1e6, lambda d: d * 1e-9])
@pytest.mark.parametrize(("out", "num_in"), SHAPES)
def test_what_a_half_cannot_hold_has_the_bits_of_the_float_matrix_too(
    out: int, num_in: int, spoil: Callable[[Tensor], Tensor], sets: list[KernelSet]
) -> None:
    q, d, m = random_groups(out, num_in)
    d, m = spoil(d), spoil(m)
    blob, floats = pack_q4.pack_exactly(q, d, m), pack_f32(weights_of(q, d, m))
    assert is_blob(blob, out, num_in)
    assert blob.nbytes < floats.nbytes / 3.5 or out < 16
    ids = torch.tensor([out - 1, 0, out // 2])
    for kernels in sets:
        for rows in (1, 7, 70):
            x = torch.randn(rows, num_in)
            got, wanted = (kernels.linear(x, w, None, out) for w in (blob, floats))
            assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), kernels.name
        assert torch.equal(kernels.embed(blob, ids), weights_of(q, d, m)[ids])


@pytest.mark.parametrize("fault", [float("inf"), float("nan")])
def test_what_is_not_finite_is_kept_as_floats(fault: float) -> None:
    q, d, m = random_groups(48, 64)
    d[3, 1] = fault
    packed = pack_q4.pack_exactly(q, d, m)
    assert packed.dtype == torch.float32
    assert not packed.isfinite().all()
