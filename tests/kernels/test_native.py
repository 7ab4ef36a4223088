"""The native kernels: each against plain torch, and bits that do not depend on other rows, place, threads or level."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError, EngineError
from headway.kernels import library as library_file
from headway.kernels import native
from headway.kernels import pack as pack_arrays
from headway.kernels.ops import KernelSet
from torch_kernels import Tensors, on_tensors

pack = Tensors(pack_arrays)

SHAPES = [(576, 576), (1536, 576), (100, 50), (48, 96), (1601, 70), (5, 3)]  # (in, out)


@dataclass
class Rows:
    """A step as attention sees it."""

    positions: Tensor
    row_of: Tensor
    tables: Tensor
    block_size: int

    @property
    def query_start(self) -> Tensor:
        raise AssertionError("native attention does not need it")

    context = query_start


def paged(positions: list[list[int]], block_size: int, kv_heads: int, dim: int) -> tuple[Rows, Tensor]:
    """A step whose row r asks at positions[r], over a shuffled pool; cells no query may see hold NaN."""
    width = max(p for row in positions for p in row) // block_size + 1
    num_blocks = len(positions) * width + 2
    tables = torch.randperm(num_blocks)[: len(positions) * width].view(len(positions), width).int()
    kv = torch.full((2, num_blocks, block_size, kv_heads, dim), float("nan"))
    for r, row in enumerate(positions):
        for p in range(max(row) + 1):
            kv[:, tables[r, p // block_size], p % block_size] = torch.randn(2, kv_heads, dim)
    row_of = torch.tensor([r for r, row in enumerate(positions) for _ in row], dtype=torch.int32)
    return Rows(torch.tensor([p for row in positions for p in row]), row_of, tables, block_size), kv


def textbook_attention(q: Tensor, kv: Tensor, rows: Rows, scale: float, window: int = 0, cap: float = 0.0) -> Tensor:
    """Softmax attention in double precision, all cells of a row at once, those past the query's position masked."""
    group = q.shape[1] // kv.shape[3]
    k, v = kv[:, rows.tables.long()].nan_to_num().flatten(2, 3).double().repeat_interleave(group, 3)  # [R, N, H, D]
    at = rows.row_of.long()
    hidden = torch.arange(k.shape[1]) > rows.positions[:, None]
    if window:
        hidden |= torch.arange(k.shape[1]) <= rows.positions[:, None] - window
    scores = torch.einsum("thd,tnhd->thn", q.double(), k[at]) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("thn,tnhd->thd", weights, v[at]).float()


def test_exp_is_within_two_units_in_the_last_place(levels: list[str], load: Callable[[int, str], KernelSet]) -> None:
    x = torch.cat([torch.linspace(-87.3, 88.7, 200_003), torch.linspace(-1, 1, 50_001)])
    exact = x.double().exp()
    unit = torch.exp2(exact.log2().floor() - 23)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -200.0, 200.0])
    for level in levels:
        exp = on_tensors(load(1, level).rms_norm.__wrapped__.__self__.exp)  # type: ignore[attr-defined]
        assert float(((exp(x).double() - exact).abs() / unit).max()) < 2.0
        assert torch.equal(exp(x), torch.cat([exp(x[:77]), exp(x[77:])]))
        got = exp(special)
        assert got[0].isnan()
        assert torch.equal(got[1:], torch.tensor([float("inf"), 0.0, 1.0, 0.0, float("inf")]))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 64, 100, 130])
def test_linear_is_right_and_a_row_is_the_same_alone(sets: list[KernelSet], rows: int) -> None:
    for num_in, num_out in SHAPES:
        x, w, bias = torch.randn(rows, num_in), torch.randn(num_out, num_in), torch.randn(num_out)
        for kernels in sets:
            packed = kernels.pack(w)
            got = kernels.linear(x, packed, bias, num_out)
            exact = x.double() @ w.double().t() + bias
            assert float((got - exact).abs().max()) < 1e-6 * num_in**0.5 * 12
            for t in {0, rows // 2, rows - 1}:
                assert torch.equal(kernels.linear(x[t : t + 1], packed, bias, num_out)[0], got[t])
            unbiased = kernels.linear(x, packed, None, num_out)
            assert float((unbiased + bias - exact).abs().max()) < 1e-6 * num_in**0.5 * 12


def test_linear_bits_ignore_the_place_of_a_row_and_other_rows(sets: list[KernelSet]) -> None:
    w, row = torch.randn(100, 777), torch.randn(777)
    for kernels in sets:
        packed = kernels.pack(w)
        alone = kernels.linear(row[None], packed, None, 100)[0]
        for rows in range(1, 101):
            crowd = torch.randn(rows, 777) * 1e3
            crowd[rows * 7 // 11] = row
            assert torch.equal(kernels.linear(crowd, packed, None, 100)[rows * 7 // 11], alone)


def test_linear_takes_rows_at_a_distance(sets: list[KernelSet]) -> None:
    wide, w = torch.randn(20, 130), torch.randn(60, 64)
    for kernels in sets:
        packed = kernels.pack(w)
        expected = kernels.linear(wide[:, 3:67].contiguous(), packed, None, 60)
        assert torch.equal(kernels.linear(wide[:, 3:67], packed, None, 60), expected)


def test_a_damaged_row_does_not_touch_its_neighbours(sets: list[KernelSet]) -> None:
    x, w = torch.randn(16, 96), torch.randn(50, 96)
    for kernels in sets:
        packed = kernels.pack(w)
        clean = kernels.linear(x, packed, None, 50)
        hurt = x.clone()
        hurt[5] = float("nan")
        got = kernels.linear(hurt, packed, None, 50)
        assert got[5].isnan().all()
        keep = torch.arange(16) != 5
        assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize(("num_out", "num_in"), [(48, 16), (100, 33), (7, 5), (192, 64)])
def test_embed_gives_back_the_rows_that_were_packed(sets: list[KernelSet], num_out: int, num_in: int) -> None:
    w = torch.randn(num_out, num_in)
    tokens = torch.randint(num_out, (90,))
    for kernels in sets:
        assert torch.equal(kernels.embed(kernels.pack(w), tokens), w[tokens])


def test_packed_weights_lie_in_the_documented_order() -> None:
    w = torch.randn(100, 7)
    flat = pack.pack_f32(w).flatten()
    for n, k in [(0, 0), (47, 3), (48, 0), (95, 6), (96, 0), (99, 6), (97, 2)]:
        panel, width = n // 48, min(48, 100 - n // 48 * 48)
        assert flat[panel * 48 * 7 + k * width + n % 48] == w[n, k]


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("dim", [8, 16, 32, 64, 80, 128])
def test_attention_matches_the_textbook(sets: list[KernelSet], dim: int, block_size: int) -> None:
    rows, kv = paged([[0], [130], list(range(58, 80)), [63, 64, 65]], block_size, 2, dim)
    for heads in (2, 6, 10):
        q = torch.randn(len(rows.positions), heads, dim) * 2
        expected = textbook_attention(q, kv, rows, dim**-0.5)
        for kernels in sets:
            assert float((kernels.attention(q, kv, rows, dim**-0.5) - expected).abs().max()) < 5e-6


def test_attention_bits_ignore_other_rows_chunking_and_where_blocks_lie(sets: list[KernelSet]) -> None:
    heads, kv_heads, dim = 6, 2, 64
    rows, kv = paged([list(range(150)), [70], [200, 201]], 16, kv_heads, dim)
    q = torch.randn(153, heads, dim)
    order = torch.randperm(kv.shape[1])
    moved = torch.empty_like(kv)
    moved[:, order] = kv
    tables = order[rows.tables.long()].int()
    for kernels in sets:
        whole = kernels.attention(q, kv, rows, 0.125)
        for chunk in (1, 5, 8, 64):
            for begin in range(0, 153, chunk):
                part = slice(begin, begin + chunk)
                some = Rows(rows.positions[part], rows.row_of[part], tables, 16)
                assert torch.equal(kernels.attention(q[part], moved, some, 0.125), whole[part])


@pytest.mark.parametrize(("window", "cap"), [(0, 2.0), (1, 0.0), (30, 2.0), (64, 0.0), (65, 2.0), (500, 0.0)])
def test_windows_and_caps_are_those_of_the_textbook_and_rows_are_independent(
    sets: list[KernelSet], window: int, cap: float
) -> None:
    torch.manual_seed(window)
    rows, kv = paged([list(range(20, 61)), [333], [64, 65, 66], list(range(150))], 16, 2, 40)
    q = torch.randn(len(rows.positions), 6, 40)
    wanted = textbook_attention(q, kv, rows, 0.2, window, cap)
    for kernels in sets:
        got = kernels.attention(q, kv, rows, 0.2, window, cap)
        assert float((got - wanted).abs().max()) < 5e-6
        for place in (0, 17, 40, 41, 44, 100, 194):
            one = Rows(rows.positions[place : place + 1], rows.row_of[place : place + 1], rows.tables, 16)
            alone = kernels.attention(q[place : place + 1], kv, one, 0.2, window, cap)
            assert torch.equal(alone[0], got[place])


def test_keys_before_the_window_may_hold_anything(sets: list[KernelSet]) -> None:
    rows, kv = paged([[100], [99, 100]], 16, 2, 40)
    q = torch.randn(3, 6, 40)
    for kernels in sets:
        clean = kernels.attention(q, kv, rows, 0.2, 40)
        broken = kv.clone()
        for row in (0, 1):
            broken[:, rows.tables[row, :3].long()] = float("nan")  # cells 0 to 47; seen are those from 60 on
        assert torch.equal(kernels.attention(q, broken, rows, 0.2, 40), clean)


def test_attention_takes_queries_inside_a_fused_row(sets: list[KernelSet]) -> None:
    rows, kv = paged([[3, 4], [9]], 4, 2, 16)
    fused = torch.randn(3, 4 * 16 + 50)
    view = fused[:, 10 : 10 + 64].unflatten(1, (4, 16))
    for kernels in sets:
        expected = kernels.attention(view.contiguous(), kv, rows, 0.25)
        assert torch.equal(kernels.attention(view, kv, rows, 0.25), expected)


def test_attention_survives_extreme_scores(sets: list[KernelSet]) -> None:
    rows, kv = paged([[99]], 16, 1, 32)
    q = torch.randn(1, 3, 32) * 1e4
    for kernels in sets:
        got = kernels.attention(q, kv, rows, 1.0)
        assert float((got - textbook_attention(q, kv, rows, 1.0)).abs().max()) < 1e-4


@pytest.mark.parametrize("n", [16, 50, 576, 7])
def test_rms_norm_matches_torch_and_rows_are_independent(sets: list[KernelSet], n: int) -> None:
    x, weight = torch.randn(40, 3, n), torch.randn(n)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    for kernels in sets:
        got = kernels.rms_norm(x, weight, 1e-5)
        assert float((got - exact).abs().max()) < 2e-6
        assert torch.equal(kernels.rms_norm(x[7, 1][None], weight, 1e-5)[0], got[7, 1])
        fused = torch.cat([torch.randn(40, 5), x.flatten(1)], 1)
        assert torch.equal(kernels.rms_norm(fused[:, 5:].unflatten(1, (3, n)), weight, 1e-5), got)
        assert torch.equal(kernels.rms_norm(fused[:, 5 : 5 + n], weight, 1e-5), got[:, 0])


@pytest.mark.parametrize("dim", [8, 16, 64, 80, 128])
def test_rope_rotates_halves_in_place_inside_a_fused_row(sets: list[KernelSet], dim: int) -> None:
    angles = torch.randn(300, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(300, (60,))
    fused = torch.randn(60, 5 * dim + 9)
    for kernels in sets:
        got = fused.clone()
        q, k = got[:, : 3 * dim].unflatten(1, (3, dim)), got[:, 3 * dim : 5 * dim].unflatten(1, (2, dim))
        kernels.rope(q, k, positions, cos, sin)
        a, b = fused[:, : 5 * dim].unflatten(1, (5, 2, dim // 2)).unbind(2)
        c, s = cos[positions][:, None], sin[positions][:, None]
        expected = torch.cat([a * c - b * s, b * c + a * s], -1).flatten(1)
        assert float((got[:, : 5 * dim] - expected).abs().max()) < 1e-6
        assert torch.equal(got[:, 5 * dim :], fused[:, 5 * dim :])
        one = fused[31:32].clone()
        one_q, one_k = one[:, : 3 * dim].unflatten(1, (3, dim)), one[:, 3 * dim : 5 * dim].unflatten(1, (2, dim))
        kernels.rope(one_q, one_k, positions[31:32], cos, sin)
        assert torch.equal(one[0], got[31])


def test_write_kv_fills_the_named_cells_and_no_other(sets: list[KernelSet]) -> None:
    fused = torch.randn(30, 4 * 24)
    k, v = fused[:, :48].unflatten(1, (2, 24)), fused[:, 48:].unflatten(1, (2, 24))
    slots = torch.randperm(10 * 8)[:30]
    for kernels in sets:
        kv = torch.zeros(2, 10, 8, 2, 24)
        kernels.write_kv(k, v, kv, slots)
        expected = torch.zeros(2, 80, 2, 24)
        expected[0, slots], expected[1, slots] = k, v
        assert torch.equal(kv.view(2, 80, 2, 24), expected)


@pytest.mark.parametrize("inner", [16, 37, 1536])
def test_silu_mul_matches_torch_and_rows_are_independent(sets: list[KernelSet], inner: int) -> None:
    x = torch.randn(50, 2 * inner) * 4
    exact = torch.nn.functional.silu(x[:, :inner].double()) * x[:, inner:].double()
    for kernels in sets:
        got = kernels.silu_mul(x)
        assert float(((got - exact).abs() / (exact.abs() + 1e-3)).max()) < 1e-6
        assert torch.equal(kernels.silu_mul(x[33:34])[0], got[33])


@pytest.mark.parametrize("inner", [16, 37, 1536])
def test_gelu_mul_and_soft_cap_match_torch_and_rows_are_independent(sets: list[KernelSet], inner: int) -> None:
    x = torch.randn(50, 2 * inner) * 4
    exact = torch.nn.functional.gelu(x[:, :inner].double(), approximate="tanh") * x[:, inner:].double()
    for kernels in sets:
        got = kernels.gelu_mul(x)
        assert float(((got - exact).abs() / (exact.abs() + 1e-3)).max()) < 2e-5
        assert torch.equal(kernels.gelu_mul(x[33:34])[0], got[33])
        capped = kernels.soft_cap(x, 3.0)
        assert float((capped - 3 * torch.tanh(x.double() / 3)).abs().max()) < 2e-6
        assert torch.equal(kernels.soft_cap(x[33:34, 1:].contiguous(), 3.0)[0], capped[33, 1:])


@pytest.mark.parametrize("inner", [16, 37, 1536])
def test_layer_norm_and_gelu_match_torch_and_rows_are_independent(sets: list[KernelSet], inner: int) -> None:
    wide = torch.randn(50, inner + 3) * 4 + 2
    x, weight, bias = wide[:, 3:], torch.randn(inner), torch.randn(inner)
    normed = torch.nn.functional.layer_norm(x.double(), (inner,), weight.double(), bias.double(), 1e-12)
    active = torch.nn.functional.gelu(wide.double())
    for kernels in sets:
        got = kernels.layer_norm(x, weight, bias, 1e-12)
        assert float((got - normed).abs().max()) < 2e-5
        assert torch.equal(kernels.layer_norm(x[33:34], weight, bias, 1e-12)[0], got[33])
        alike = kernels.gelu(wide)
        assert float((alike - active).abs().max()) < 2e-6
        assert torch.equal(kernels.gelu(wide[33:34, 1:].contiguous())[0], alike[33, 1:])
        far = kernels.gelu(torch.tensor([0.0, 200.0, -200.0, float("nan")]))
        assert far[:3].tolist() == [0.0, 200.0, 0.0]
        assert bool(far[3].isnan())


def run_all(kernels: KernelSet) -> list[Tensor]:
    """Every kernel on inputs big enough to be split over threads."""
    torch.manual_seed(5)
    rows, kv = paged([list(range(40)), [333], [64, 65]], 16, 3, 64)
    fused, x, w = torch.randn(43, 15 * 64), torch.randn(43, 700), torch.randn(500, 700)
    q, k, v = (part.unflatten(1, (-1, 64)) for part in fused.split([9 * 64, 3 * 64, 3 * 64], 1))
    angles = torch.randn(400, 32)
    packed = kernels.pack(w)
    kernels.rope(q, k, rows.positions, angles.cos(), angles.sin())
    slots = rows.tables[rows.row_of.long(), rows.positions // 16] * 16 + rows.positions % 16
    kernels.write_kv(k, v, kv, slots)
    return [
        *(kernels.linear(x, packed, w[:, 0].contiguous(), 500), kernels.embed(packed, torch.arange(500))),
        *(kernels.rms_norm(fused, torch.randn(fused.shape[1]), 1e-6), kernels.silu_mul(fused), fused, kv),
        *(kernels.layer_norm(x, x[0], x[1], 1e-6), kernels.gelu(x)),
        kernels.attention(q, kv, rows, 0.125),
    ]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


def test_bits_ignore_the_number_of_threads(levels: list[str], load: Callable[[int, str], KernelSet]) -> None:
    for level in levels:
        alone = run_all(load(1, level))
        assert all(same(run_all(load(threads, level)), alone) for threads in (2, 3, 7))


def test_levels_with_fused_multiply_add_give_equal_bits(
    levels: list[str], load: Callable[[int, str], KernelSet]
) -> None:
    results = [run_all(load(2, level)) for level in levels if level != "generic"]
    assert all(same(result, results[0]) for result in results[1:])


def test_indices_outside_memory_are_refused(sets: list[KernelSet]) -> None:
    rows, kv = paged([[40], [3]], 16, 2, 16)
    q, w = torch.randn(2, 4, 16), torch.randn(50, 16)
    k = torch.randn(2, 2, 16)
    table = torch.ones(50, 8)
    for kernels in sets:
        for bad in (-1, kv.shape[1]):
            wrong = rows.tables.clone()
            wrong[0, 1] = bad
            with pytest.raises(EngineError, match="attention"):
                kernels.attention(q, kv, Rows(rows.positions, rows.row_of, wrong, 16), 1.0)
        with pytest.raises(EngineError, match="attention"):
            kernels.attention(q, kv, Rows(torch.tensor([40, 48]), rows.row_of, rows.tables, 16), 1.0)
        with pytest.raises(EngineError, match="attention"):
            kernels.attention(q, kv, Rows(rows.positions, torch.tensor([0, 2]).int(), rows.tables, 16), 1.0)
        with pytest.raises(EngineError, match=r"0\.\.49"):
            kernels.embed(kernels.pack(w), torch.tensor([3, 50]))
        with pytest.raises(EngineError, match="slot"):
            kernels.write_kv(k, k, kv, torch.tensor([0, kv.shape[1] * 16]))
        with pytest.raises(EngineError, match="position"):
            kernels.rope(q, k, torch.tensor([-1, 0]), table, table)


def test_tensors_of_another_kind_are_refused(sets: list[KernelSet]) -> None:
    x, w = torch.randn(4, 16), torch.randn(50, 16)
    for kernels in sets:
        with pytest.raises(EngineError, match=r"x is float64"):
            kernels.linear(x.double(), kernels.pack(w), None, 50)
        with pytest.raises(EngineError, match="contiguous rows"):
            kernels.linear(torch.randn(16, 4).t(), kernels.pack(w), None, 50)
        with pytest.raises(EngineError, match="packed"):
            kernels.linear(x, kernels.pack(w), None, 49)
        with pytest.raises(EngineError, match="int64"):
            kernels.embed(kernels.pack(w), torch.tensor([1], dtype=torch.int32))


def test_empty_calls_give_empty_results(sets: list[KernelSet]) -> None:
    rows = Rows(torch.empty(0).long(), torch.empty(0).int(), torch.empty(0, 0).int(), 16)
    for kernels in sets:
        assert kernels.linear(torch.empty(0, 16), kernels.pack(torch.randn(50, 16)), None, 50).shape == (0, 50)
        assert kernels.attention(torch.empty(0, 4, 16), torch.zeros(2, 3, 16, 2, 16), rows, 1.0).shape == (0, 4, 16)
        assert kernels.silu_mul(torch.empty(0, 32)).shape == (0, 16)


def test_unknown_levels_and_thread_counts_are_refused(library: Path | None) -> None:
    with pytest.raises(ConfigError, match="auto, generic, avx2, avx512, avx512vnni"):
        native.load(1, "sse", library)
    with pytest.raises(ConfigError, match="at least 1"):
        native.load(0, "auto", library)


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libheadway_kernels.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="scripts/build-kernels"):
        native.load(1, "auto", path)


def test_without_the_library_loading_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headway_kernels", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert native.load(1) is None
    assert library_file.cpu_level() == "none"
