"""Matrices in bfloat16 and int8: the packed forms, the native products against plain torch, and bits that do not
depend on other rows, place, threads or level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError, EngineError
from headway.kernels import native, ref_q4, ref_quant, select
from headway.kernels import pack as pack_arrays
from headway.kernels.ops import KernelSet
from headway.kernels.packings import PACKINGS
from headway.kernels.packings import is_blob as is_array_blob
from torch_kernels import Tensors, of_tensors, on_tensors

pack = Tensors(pack_arrays)
is_blob = on_tensors(is_array_blob)

SHAPES = [(576, 960), (1536, 192), (100, 50), (64, 17), (1601, 70), (5, 3), (1, 1), (130, 200)]  # (in, out)
DTYPES = ["bfloat16", "int8"]
Load = Callable[..., KernelSet]


@pytest.fixture
def load_dtype(library: Path | None) -> Load:
    def load(threads: int, level: str, dtype: str) -> KernelSet:
        kernels = native.load(threads, level, library, dtype)
        assert kernels is not None
        return of_tensors(kernels)

    return load


def quantize_natively(kernels: KernelSet, x: Tensor, group: int) -> Tensor:
    records: Tensor = on_tensors(kernels.linear.__wrapped__.__self__.quantize)(x, group)  # type: ignore[attr-defined]
    return records


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_products_match_plain_torch(levels: list[str], load_dtype: Load, num_in: int, num_out: int, dtype: str) -> None:
    torch.manual_seed(num_in)
    w, bias = torch.randn(num_out, num_in), torch.randn(num_out)
    oracle = of_tensors(ref_quant.load(dtype))
    packed = oracle.pack(w)
    for rows in (1, 2, 3, 4, 5, 8, 9, 17, 33, 70, 130):
        x = torch.randn(rows, num_in)
        expected = {b: oracle.linear(x, packed, bias if b else None, num_out) for b in (True, False)}
        for level in levels if rows < 9 else levels[1:]:
            kernels = load_dtype(2, level, dtype)
            for b, wanted in expected.items():
                got = kernels.linear(x, packed, bias if b else None, num_out)
                assert float((got - wanted).abs().max()) < 1e-5 * num_in**0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_as_near_to_that_of_floats_as_its_rounding_allows(dtype: str) -> None:
    torch.manual_seed(2)
    x, w = torch.randn(40, 1000), torch.randn(300, 1000)
    oracle = of_tensors(ref_quant.load(dtype))
    exact = x.double() @ w.double().t()
    wrong = oracle.linear(x, oracle.pack(w), None, 300) - exact
    assert float(wrong.norm() / exact.norm()) < {"bfloat16": 0.003, "int8": 0.02}[dtype]


def test_bfloat16_gives_the_bits_of_float32_with_rounded_weights(levels: list[str], load_dtype: Load) -> None:
    for num_in, num_out in SHAPES:
        torch.manual_seed(num_in)
        w, bias = torch.randn(num_out, num_in), torch.randn(num_out)
        for level in levels:
            small, wide = load_dtype(2, level, "bfloat16"), load_dtype(2, level, "float32")
            packed, rounded = small.pack(w), wide.pack(w.bfloat16().float())
            for rows in (1, 2, 3, 6, 20):
                x = torch.randn(rows, num_in)
                wanted = wide.linear(x, rounded, bias, num_out)
                assert torch.equal(small.linear(x, packed, bias, num_out), wanted)


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_bits_ignore_other_rows_and_place(levels: list[str], load_dtype: Load, dtype: str) -> None:
    torch.manual_seed(3)
    w, row = torch.randn(500, 777), torch.randn(777)
    for level in levels:
        kernels = load_dtype(1, level, dtype)
        packed = kernels.pack(w)
        alone = kernels.linear(row[None], packed, None, 500)[0]
        for rows in (*range(2, 18), 31, 33, 64, 70, 129, 150) if level != "generic" else (2, 3, 7):
            crowd = torch.randn(rows, 777) * 1e3
            crowd[rows * 7 // 11] = row
            assert torch.equal(kernels.linear(crowd, packed, None, 500)[rows * 7 // 11], alone)


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_bits_ignore_threads_and_levels(levels: list[str], load_dtype: Load, dtype: str) -> None:
    torch.manual_seed(4)
    w, x, bias = torch.randn(1000, 650), torch.randn(43, 650), torch.randn(1000)
    packed = on_tensors(PACKINGS[dtype].pack)(w)
    wide = [level for level in levels if level != "generic"]
    for rows in (1, 2, 4, 43):
        results = [
            load_dtype(threads, level, dtype).linear(x[:rows], packed, bias, 1000)
            for level in wide
            for threads in (1, 2, 3)
        ]
        assert all(torch.equal(result, results[0]) for result in results[1:])
    for threads in (1, 3):
        generic = [load_dtype(threads, level, dtype).linear(x[:5], packed, bias, 1000) for level in levels[:1] * 2]
        assert all(torch.equal(result, generic[0]) for result in generic)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_is_exact_too(dtype: str) -> None:
    torch.manual_seed(5)
    oracle = of_tensors(ref_quant.load(dtype))
    x, packed = torch.randn(37, 200), oracle.pack(torch.randn(90, 200))
    whole = oracle.linear(x, packed, None, 90)
    for t in (0, 17, 36):
        assert torch.equal(oracle.linear(x[t : t + 1], packed, None, 90)[0], whole[t])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(48, 16), (100, 33), (7, 5), (192, 64), (1, 1)])
def test_embed_gives_the_rows_as_they_were_rounded(
    levels: list[str], load_dtype: Load, num_out: int, num_in: int, dtype: str
) -> None:
    torch.manual_seed(num_out)
    w = torch.randn(num_out, num_in)
    tokens = torch.randint(num_out, (90,))
    if dtype == "int8":
        scale, whole = pack.quantize_rows(w)
        wanted = (whole * scale[:, None])[tokens]
    else:
        wanted = w.bfloat16().float()[tokens]
    oracle = of_tensors(ref_quant.load(dtype))
    assert torch.equal(oracle.embed(oracle.pack(w), tokens), wanted)
    for level in levels:
        kernels = load_dtype(2, level, dtype)
        assert torch.equal(kernels.embed(kernels.pack(w), tokens), wanted)
        with pytest.raises(EngineError, match=f"a token is outside 0..{num_out - 1}"):
            kernels.embed(kernels.pack(w), torch.tensor([0, num_out]))


def test_packed_values_lie_in_the_documented_order() -> None:
    torch.manual_seed(6)
    w = torch.randn(100, 70)
    scale, whole = pack.quantize_rows(w)
    small, bf16 = pack.pack_i8(w), pack.pack_bf16(w)
    assert torch.equal(small[64 : 64 + 400].view(torch.float32), scale)
    values = bf16[64:].view(torch.bfloat16)
    for n, k in [(0, 0), (47, 3), (48, 0), (95, 69), (96, 0), (99, 66), (97, 2)]:
        panel, width = n // 48 * 48, 48 if n < 96 else 16
        at = 64 + 4 * 112 + panel * 128 + k // 4 * width * 4 + n % 48 * 4 + k % 4
        assert int(small[at]) - 128 == whole[n, k]
        assert values[panel * 70 + k // 2 * width * 2 + n % 48 * 2 + k % 2] == w[n, k].bfloat16()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_a_blob_says_what_it_is_and_comes_back(num_in: int, num_out: int, dtype: str) -> None:
    w = torch.randn(num_out, num_in)
    blob = on_tensors(PACKINGS[dtype].pack)(w)
    assert is_blob(blob, num_out, num_in)
    assert not is_blob(blob, num_out, num_in + 1)
    if dtype == "bfloat16":
        assert torch.equal(pack.unpack_bf16(blob), w.bfloat16().float())
    else:
        scale, whole = pack.unpack_i8(blob)
        assert float((whole[:, :num_in] * scale[:, None] - w).abs().max()) <= float(w.abs().max()) / 127 * 0.51
        assert not whole[:, num_in:].any()


def special_rows() -> Tensor:
    """Rows whose groups are what quantizing could trip over, among ordinary ones."""
    x = torch.randn(12, 150)
    x[1] = 0.0
    x[2] = 1e-40  # below what 127 can be divided by
    x[3, :64] = 1e30
    x[4, 70] = float("nan")
    x[5, 149] = -float("inf")
    x[6] = torch.arange(150) - 75.5  # halves, to be rounded to even
    x[6, ::10] = 127.0
    x[7, :64] = -0.0
    return x


@pytest.mark.parametrize("group", [32, 64])
def test_inputs_are_quantized_alike_everywhere(levels: list[str], load_dtype: Load, group: int) -> None:
    torch.manual_seed(7)
    x = special_rows()
    q, scale = ref_q4.quantize(x, group)
    groups = scale.shape[1]
    for level in levels:
        for rows in (x, torch.cat([x, x], 1)[:, :150]):
            records = quantize_natively(load_dtype(2, level, "int8"), rows, group)
            whole = records[:, : groups * group].view(torch.int8)
            rest = records[:, groups * group : groups * (group + 8)].contiguous()
            assert torch.equal(whole.float(), q.flatten(1))
            assert torch.equal(
                rest[:, : groups * 4].contiguous().view(torch.float32).nan_to_num(-1.0), scale.nan_to_num(-1.0)
            )
            start = rest[:, groups * 4 :].contiguous().view(torch.int32)
            assert torch.equal(start, (q.sum(2) * (-128 if group == 64 else 1)).int())


def test_a_row_that_is_not_finite_is_nan_and_affects_no_other(levels: list[str], load_dtype: Load) -> None:
    torch.manual_seed(8)
    x, w = special_rows(), torch.randn(50, 150)
    damaged = torch.tensor([4, 5])
    keep = torch.tensor([t for t in range(12) if t not in (4, 5)])
    for kernels in [of_tensors(ref_quant.load("int8")), *(load_dtype(1, level, "int8") for level in levels)]:
        packed = kernels.pack(w)
        got = kernels.linear(x, packed, None, 50)
        assert got[damaged].isnan().all()
        assert torch.equal(got[keep], kernels.linear(x[keep], packed, None, 50))
        assert got[keep].isfinite().all()
        assert not got[1:3].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_a_distance_and_none_at_all(levels: list[str], load_dtype: Load, dtype: str) -> None:
    torch.manual_seed(9)
    wide, w = torch.randn(20, 130), torch.randn(60, 64)
    for level in levels:
        kernels = load_dtype(2, level, dtype)
        packed = kernels.pack(w)
        expected = kernels.linear(wide[:, 3:67].contiguous(), packed, None, 60)
        assert torch.equal(kernels.linear(wide[:, 3:67], packed, None, 60), expected)
        assert kernels.linear(wide[:0, 3:67], packed, None, 60).shape == (0, 60)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blobs_of_another_kind_are_refused(levels: list[str], load_dtype: Load, dtype: str) -> None:
    x, w = torch.randn(4, 64), torch.randn(50, 64)
    other = on_tensors(PACKINGS["int8" if dtype == "bfloat16" else "bfloat16"].pack)(w)
    for level in levels:
        kernels = load_dtype(1, level, dtype)
        packed = kernels.pack(w)
        for wrong in (packed[:-64], other, w, packed.view(-1, 64), torch.cat([packed, packed[:64]])):
            with pytest.raises(EngineError, match=r"linear: w is .* packed as panel48"):
                kernels.linear(x, wrong, None, 50)
            with pytest.raises(EngineError, match=r"embed: w is .* packed as panel48"):
                kernels.embed(wrong, torch.tensor([0]))
        for out in (49, 64):
            with pytest.raises(EngineError, match=r"packed as panel48"):
                kernels.linear(x, packed, None, out)


def test_a_row_of_weights_too_small_to_scale_is_zero() -> None:
    w = torch.randn(3, 70)
    w[0], w[1] = 0.0, 1e-41
    scale, whole = pack.unpack_i8(pack.pack_i8(w))
    assert scale[0] == scale[1] == 0
    assert not whole[:2].any()
    assert whole[2].abs().max() == 127


@pytest.mark.parametrize("dtype", list(PACKINGS))
def test_plain_torch_has_every_dtype(dtype: str) -> None:
    kernels = of_tensors(select.load("ref", 1, dtype))
    w = torch.randn(60, 64)
    assert kernels.name == "ref"
    assert kernels.linear(torch.randn(3, 64), kernels.pack(w), None, 60).shape == (3, 60)
    assert kernels.embed((kernels.pack_table or kernels.pack)(w), torch.tensor([1, 2])).shape == (2, 64)


def test_unknown_dtypes_are_refused() -> None:
    for load in (lambda: ref_quant.load("int4"), lambda: native.load(1, dtype="int4")):
        with pytest.raises(ConfigError, match="float32, bfloat16, int8, q4"):
            load()
