"""4-bit matrices: the packed form, the native product against plain torch, and bits that do not depend on
other rows, place, threads or level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.errors import EngineError, ModelFormatError
from headway.kernels import native, ref_q4
from headway.kernels import pack_q4 as pack_q4_arrays
from headway.kernels.ops import KernelSet
from headway.kernels.packings import PACKINGS
from headway.kernels.packings import is_blob as is_array_blob
from torch_kernels import Tensors, of_tensors, on_tensors

pack_q4 = Tensors(pack_q4_arrays)
is_blob = on_tensors(is_array_blob)

SHAPES = [(576, 576), (70, 100), (48, 96), (97, 1601), (16, 32), (5, 3), (33, 544)]  # (out, in)


@pytest.fixture
def load4(library: Path | None) -> Callable[[int, str], KernelSet]:
    def load_level(threads: int, level: str) -> KernelSet:
        kernels = native.load(threads, level, library, "q4")
        assert kernels is not None
        return of_tensors(kernels)

    return load_level


@pytest.fixture
def sets4(levels: list[str], load4: Callable[[int, str], KernelSet]) -> list[KernelSet]:
    """One set per level, on two threads."""
    torch.manual_seed(4)
    return [load4(2, level) for level in levels]


def random_groups(out: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randint(16, (out, groups * 32), dtype=torch.uint8)
    return q, torch.randn(out, groups).half().float(), torch.randn(out, groups).half().float()


def weights_of(q: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return q * d.repeat_interleave(32, 1) + m.repeat_interleave(32, 1)


@pytest.mark.parametrize(("out", "groups"), [(48, 1), (1, 3), (47, 2), (64, 2), (100, 5), (144, 1)])
def test_groups_come_back_as_they_were_packed(out: int, groups: int) -> None:
    torch.manual_seed(out)
    packed = random_groups(out, groups)
    blob = pack_q4.pack_groups(*packed)
    assert is_blob(blob, out, groups * 32)
    assert not is_blob(blob, out, groups * 32 + 1)
    assert not is_blob(blob[:-64], out, groups * 32)
    assert all(torch.equal(got, wanted) for got, wanted in zip(pack_q4.unpack(blob), packed, strict=True))


def test_a_cell_lies_in_the_documented_order() -> None:
    torch.manual_seed(0)
    q, d, m = random_groups(100, 3)
    blob = pack_q4.pack_groups(q, d, m)
    for n, k in [(0, 0), (17, 5), (47, 95), (48, 0), (95, 36), (96, 63), (99, 31), (97, 70)]:
        panel, columns = n // 48, 48 if n < 96 else 16
        start = 64 + (panel * 48 // 16 * 3 + k // 32 * columns // 16 + n % 48 // 16) * 320
        byte = int(blob[start + k % 32 // 8 * 64 + n % 16 * 4 + k % 4])
        assert (byte >> 4 if k % 8 >= 4 else byte & 15) == q[n, k]
        scales = blob[start + 256 : start + 320].view(torch.float16)
        assert (scales[n % 16], scales[16 + n % 16]) == (d[n, k // 32], m[n, k // 32])


@pytest.mark.parametrize(("out", "num_in"), [(50, 96), (7, 33), (3, 1)])
def test_rounding_moves_no_weight_by_more_than_half_a_step(out: int, num_in: int) -> None:
    torch.manual_seed(out)
    w = torch.randn(out, num_in) * torch.logspace(-3, 2, out)[:, None]
    blob = pack_q4.pack(w)
    assert is_blob(blob, out, num_in)
    q, d, m = pack_q4.unpack(blob)
    moved = (weights_of(q, d, m)[:, :num_in] - w).abs()
    # Half a step, and what rounding its ends to float16 adds.
    allowed = d * 0.5 + (m.abs() + 15 * d) * 2**-11 + 2**-23
    assert bool((moved <= allowed.repeat_interleave(32, 1)[:, :num_in]).all())


def test_a_group_of_equal_weights_is_kept() -> None:
    w = torch.cat([torch.zeros(4, 32), torch.full((4, 32), 0.375)], 1)
    assert torch.equal(weights_of(*pack_q4.unpack(pack_q4.pack(w))), w)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 1e6])
def test_weights_without_a_four_bit_form_are_refused(fault: float) -> None:
    w = torch.randn(20, 64)
    w[3, 40] = fault
    with pytest.raises(ModelFormatError, match=r"65504.*--dtype int8"):
        pack_q4.pack(w)
    with pytest.raises(ModelFormatError, match="65504"):
        pack_q4.pack_groups(torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 1), torch.tensor([[fault]]))


def test_groups_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(EngineError, match="whole groups of 32"):
        pack_q4.pack_groups(torch.zeros(4, 40, dtype=torch.uint8), torch.zeros(4, 1), torch.zeros(4, 1))


def test_the_oracle_is_near_the_product_of_what_was_packed() -> None:
    torch.manual_seed(2)
    x, groups, bias = torch.randn(9, 576), random_groups(70, 18), torch.randn(70)
    exact = x.double() @ weights_of(*groups).double().t() + bias
    got = ref_q4.linear(x, pack_q4.pack_groups(*groups), bias, 70)
    # Inputs move by at most half a step of 127.
    assert float((got - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 33, 70, 130])
def test_linear_matches_the_oracle_and_a_row_is_the_same_alone(sets4: list[KernelSet], rows: int) -> None:
    for out, num_in in SHAPES:
        x, w, bias = torch.randn(rows, num_in), torch.randn(out, num_in), torch.randn(out)
        blob = pack_q4.pack(w)
        for y_bias in (bias, None):
            wanted = ref_q4.linear(x, blob, y_bias, out)
            for kernels in sets4:
                got = kernels.linear(x, blob, y_bias, out)
                assert float((got - wanted).abs().max()) < 2e-6 * num_in**0.5 * 4
                for t in {0, rows // 2, rows - 1}:
                    assert torch.equal(kernels.linear(x[t : t + 1], blob, y_bias, out)[0], got[t])


def test_linear_bits_ignore_the_place_of_a_row_and_other_rows(sets4: list[KernelSet]) -> None:
    blob, row = pack_q4.pack(torch.randn(100, 777)), torch.randn(777)
    for kernels in sets4:
        alone = kernels.linear(row[None], blob, None, 100)[0]
        for rows in range(1, 101):
            crowd = torch.randn(rows, 777) * 1e3
            crowd[rows * 7 // 11] = row
            assert torch.equal(kernels.linear(crowd, blob, None, 100)[rows * 7 // 11], alone)


def test_bits_ignore_threads_and_levels(levels: list[str], load4: Callable[[int, str], KernelSet]) -> None:
    torch.manual_seed(6)
    blob, bias = pack_q4.pack(torch.randn(500, 700)), torch.randn(500)
    # Rows at all sizes: an input far from the others makes the rest of its group small.
    xs = [torch.randn(rows, 700) * torch.logspace(-6, 6, 700) for rows in (1, 2, 43)]
    by_level = {}
    for level in levels:
        results = [
            torch.cat([kernels.linear(x, blob, bias, 500) for x in xs])
            for kernels in (load4(threads, level) for threads in (1, 2, 3))
        ]
        assert all(torch.equal(result, results[0]) for result in results)
        by_level[level] = results[0]
    fused = [result for level, result in by_level.items() if level != "generic"]
    assert all(torch.equal(result, fused[0]) for result in fused)


def test_extreme_weights_and_inputs_overflow_no_sum(sets4: list[KernelSet]) -> None:
    q = torch.full((48, 64), 15, dtype=torch.uint8)
    blob = pack_q4.pack_groups(q, torch.ones(48, 2), torch.full((48, 2), -7.5))
    for sign in (1.0, -1.0):
        x = torch.full((5, 64), sign)
        for kernels in sets4:
            assert torch.equal(kernels.linear(x, blob, None, 48), torch.full((5, 48), sign * 64 * 7.5))


def test_a_damaged_row_does_not_touch_its_neighbours(sets4: list[KernelSet]) -> None:
    x, blob = torch.randn(16, 96), pack_q4.pack(torch.randn(50, 96))
    for kernels in sets4:
        clean = kernels.linear(x, blob, None, 50)
        for fault in (float("nan"), float("inf")):
            hurt = x.clone()
            hurt[5, 7] = fault
            got = kernels.linear(hurt, blob, None, 50)
            assert got[5].isnan().all()
            keep = torch.arange(16) != 5
            assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize(("out", "num_in"), [(48, 32), (100, 33), (7, 70), (192, 64)])
def test_embed_gives_the_packed_rows(sets4: list[KernelSet], out: int, num_in: int) -> None:
    blob, tokens = pack_q4.pack(torch.randn(out, num_in)), torch.randint(out, (90,))
    for kernels in sets4:
        assert torch.equal(kernels.embed(blob, tokens), ref_q4.embed(blob, tokens))


def test_a_set_of_four_bits_takes_tables_of_eight_and_refuses_the_rest(sets4: list[KernelSet]) -> None:
    w, x = torch.randn(70, 96), torch.randn(3, 96)
    eight = on_tensors(PACKINGS["int8"].pack)(w)
    for kernels in sets4:
        assert kernels.pack_table is not None
        assert torch.equal(kernels.pack_table(w), eight)
        assert float((kernels.linear(x, eight, None, 70) - x @ w.t()).norm() / (x @ w.t()).norm()) < 0.02
        assert float((kernels.embed(eight, torch.arange(70)) - w).abs().max()) < 0.03
        for wrong in (w, eight[:-64], eight[:40], torch.zeros(128, dtype=torch.uint8)):
            with pytest.raises(EngineError, match="linear"):
                kernels.linear(x, wrong, None, 70)
