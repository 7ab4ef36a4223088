"""Matrices of 8-bit groups: the packed form, the native product against plain torch and against floats, and bits that
do not depend on other rows, place, threads or level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.errors import EngineError
from headway.kernels import native, ref_q8
from headway.kernels import pack_q8 as pack_q8_arrays
from headway.kernels.ops import KernelSet
from headway.kernels.packings import is_blob as is_array_blob
from torch_kernels import Tensors, of_tensors, on_tensors

pack_q8 = Tensors(pack_q8_arrays)
is_blob = on_tensors(is_array_blob)

SHAPES = [(576, 576), (70, 96), (48, 1600), (97, 320), (16, 32), (5, 16), (33, 544), (240, 64)]  # (out, in)
Groups = tuple[Tensor, Tensor, Tensor | None]
pytestmark = pytest.mark.parametrize("has_floors", [False, True], ids=["steps", "floors"])


@pytest.fixture
def load8(library: Path | None) -> Callable[[int, str], KernelSet]:
    def load_level(threads: int, level: str) -> KernelSet:
        kernels = native.load(threads, level, library, "q4")
        assert kernels is not None
        return of_tensors(kernels)

    return load_level


@pytest.fixture
def sets8(levels: list[str], load8: Callable[[int, str], KernelSet]) -> list[KernelSet]:
    """One set per level, on two threads."""
    torch.manual_seed(4)
    return [load8(2, level) for level in levels]


def random_groups(out: int, num_in: int, has_floors: bool) -> Groups:
    q = torch.randint(256, (out, num_in), dtype=torch.uint8)
    groups = (out, num_in // 16)
    return q, torch.randn(groups) / 64, torch.randn(groups) if has_floors else None


def weights_of(q: Tensor, d: Tensor, m: Tensor | None) -> Tensor:
    wide = d.repeat_interleave(16, 1)
    return wide * (q.float() - 128) if m is None else wide * q.float() + m.repeat_interleave(16, 1)


@pytest.mark.parametrize(("out", "groups"), [(48, 1), (1, 3), (47, 2), (64, 2), (100, 5), (144, 1)])
def test_groups_come_back_as_they_were_packed(out: int, groups: int, has_floors: bool) -> None:
    torch.manual_seed(out)
    packed = random_groups(out, groups * 16, has_floors)
    blob = pack_q8.pack_bytes(*packed)
    assert is_blob(blob, out, groups * 16)
    assert not is_blob(blob, out, groups * 16 + 1)
    assert not is_blob(blob[:-64], out, groups * 16)
    for got, wanted in zip(pack_q8.unpack(blob), packed, strict=True):
        assert got is wanted is None or torch.equal(got, wanted)


def test_a_cell_lies_in_the_documented_order(has_floors: bool) -> None:
    torch.manual_seed(0)
    q, d, m = random_groups(100, 96, has_floors)
    blob = pack_q8.pack_bytes(q, d, m)
    size = 384 if has_floors else 320
    for n, k in [(0, 0), (17, 5), (47, 95), (48, 0), (95, 36), (96, 63), (99, 31), (97, 70)]:
        panel, columns = n // 48, 48 if n < 96 else 16
        start = 64 + (panel * 48 // 16 * 6 + k // 16 * columns // 16 + n % 48 // 16) * size
        assert blob[start + k % 16 // 4 * 64 + n % 16 * 4 + k % 4] == q[n, k]
        numbers = blob[start + 256 : start + size].view(torch.float32)
        assert numbers[n % 16] == d[n, k // 16]
        assert m is None or numbers[16 + n % 16] == m[n, k // 16]


def test_groups_of_the_wrong_shape_are_refused(has_floors: bool) -> None:
    m = torch.zeros(4, 2) if has_floors else None
    with pytest.raises(EngineError, match="whole groups of 16"):
        pack_q8.pack_bytes(torch.zeros(4, 40, dtype=torch.uint8), torch.zeros(4, 2), m)


def test_the_oracle_is_near_the_product_of_what_was_packed(has_floors: bool) -> None:
    torch.manual_seed(2)
    x, groups, bias = torch.randn(9, 576), random_groups(70, 576, has_floors), torch.randn(70)
    exact = x.double() @ weights_of(*groups).double().t() + bias
    got = ref_q8.linear(x, pack_q8.pack_bytes(*groups), bias, 70)
    # Inputs move by at most half a step of 127.
    assert float((got - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 33, 70, 130])
def test_linear_matches_the_oracle_and_a_row_is_the_same_alone(
    sets8: list[KernelSet], rows: int, has_floors: bool
) -> None:
    for out, num_in in SHAPES:
        x, bias = torch.randn(rows, num_in), torch.randn(out)
        blob = pack_q8.pack_bytes(*random_groups(out, num_in, has_floors))
        for y_bias in (bias, None):
            wanted = ref_q8.linear(x, blob, y_bias, out)
            for kernels in sets8:
                got = kernels.linear(x, blob, y_bias, out)
                assert float((got - wanted).abs().max()) < 2e-5 * num_in**0.5
                for t in {0, rows // 2, rows - 1}:
                    assert torch.equal(kernels.linear(x[t : t + 1], blob, y_bias, out)[0], got[t])


def test_inputs_that_are_whole_numbers_are_multiplied_exactly(sets8: list[KernelSet], has_floors: bool) -> None:
    q, d, m = random_groups(100, 160, has_floors)
    d, m = (d * 64).round() / 64, None if m is None else m.round()
    x = torch.randint(-127, 128, (7, 160)).float()
    x[:, ::16] = 127.0  # every group's step is 1
    exact = x.double() @ weights_of(q, d, m).double().t()
    for kernels in sets8:
        assert torch.equal(kernels.linear(x, pack_q8.pack_bytes(q, d, m), None, 100).double(), exact)


def test_linear_bits_ignore_the_place_of_a_row_and_other_rows(sets8: list[KernelSet], has_floors: bool) -> None:
    blob, row = pack_q8.pack_bytes(*random_groups(100, 768, has_floors)), torch.randn(768)
    for kernels in sets8:
        alone = kernels.linear(row[None], blob, None, 100)[0]
        for rows in range(1, 101, 3):
            crowd = torch.randn(rows, 768) * 1e3
            crowd[rows * 7 // 11] = row
            assert torch.equal(kernels.linear(crowd, blob, None, 100)[rows * 7 // 11], alone)


def test_bits_ignore_threads_and_levels(
    levels: list[str], load8: Callable[[int, str], KernelSet], has_floors: bool
) -> None:
    torch.manual_seed(6)
    blob, bias = pack_q8.pack_bytes(*random_groups(500, 704, has_floors)), torch.randn(500)
    # Rows at all sizes: an input far from the others makes the rest of its group small.
    xs = [torch.randn(rows, 704) * torch.logspace(-6, 6, 704) for rows in (1, 2, 3, 4, 43)]
    by_level = {}
    for level in levels:
        results = [
            torch.cat([kernels.linear(x, blob, bias, 500) for x in xs])
            for kernels in (load8(threads, level) for threads in (1, 2, 3))
        ]
        assert all(torch.equal(result, results[0]) for result in results)
        by_level[level] = results[0]
    fused = [result for level, result in by_level.items() if level != "generic"]
    assert all(torch.equal(result, fused[0]) for result in fused)


def test_extreme_weights_and_inputs_overflow_no_sum(sets8: list[KernelSet], has_floors: bool) -> None:
    floors = torch.full((48, 4), -255.0) if has_floors else None
    for byte in (0, 255):
        q = torch.full((48, 64), byte, dtype=torch.uint8)
        blob = pack_q8.pack_bytes(q, torch.ones(48, 4), floors)
        weight = byte - (255 if has_floors else 128)
        for sign in (1.0, -1.0):
            for kernels in sets8:
                got = kernels.linear(torch.full((5, 64), sign), blob, None, 48)
                assert torch.allclose(got, torch.full((5, 48), sign * 64 * weight), rtol=1e-6, atol=0.01)


def test_a_damaged_row_does_not_touch_its_neighbours(sets8: list[KernelSet], has_floors: bool) -> None:
    x, blob = torch.randn(16, 96), pack_q8.pack_bytes(*random_groups(50, 96, has_floors))
    for kernels in sets8:
        clean = kernels.linear(x, blob, None, 50)
        for fault in (float("nan"), float("inf")):
            hurt = x.clone()
            hurt[5, 7] = fault
            got = kernels.linear(hurt, blob, None, 50)
            assert got[5].isnan().all()
            keep = torch.arange(16) != 5
            assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize(("out", "num_in"), [(48, 32), (100, 48), (7, 64), (192, 16)])
def test_embed_gives_the_packed_rows(sets8: list[KernelSet], out: int, num_in: int, has_floors: bool) -> None:
    groups, tokens = random_groups(out, num_in, has_floors), torch.randint(out, (90,))
    blob = pack_q8.pack_bytes(*groups)
    assert torch.equal(ref_q8.embed(blob, tokens), weights_of(*groups)[tokens])
    for kernels in sets8:
        assert torch.equal(kernels.embed(blob, tokens), ref_q8.embed(blob, tokens))


def test_a_set_of_four_bits_refuses_what_is_damaged(sets8: list[KernelSet], has_floors: bool) -> None:
    x, blob = torch.randn(3, 96), pack_q8.pack_bytes(*random_groups(70, 96, has_floors))
    for kernels in sets8:
        for wrong in (blob[:-64], blob[:40], torch.cat([blob, blob[-64:]])):
            with pytest.raises(EngineError, match="linear"):
                kernels.linear(x, wrong, None, 70)
