"""The plain-torch kernels against textbook loops in float64, over the matrix of shapes; then their exactness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headway.kernels import ref, ref_kv
from headway.kernels.ops import KernelSet
from torch_kernels import of_tensors

OPS: KernelSet = of_tensors(ref.load())


@dataclass(frozen=True, slots=True)
class Rows:
    positions: Tensor
    row_of: Tensor
    tables: Tensor
    query_start: Tensor
    context: Tensor
    block_size: int


def make_rows(work: list[tuple[int, int]], block_size: int, num_blocks: int) -> Rows:
    """work: (start, count) per row; every row has its own random blocks."""
    i32 = torch.int32
    counts = torch.tensor([count for _, count in work])
    context = torch.tensor([start + count for start, count in work])
    widths = (-(-context // block_size)).tolist()
    deal = torch.randperm(num_blocks).tolist()
    tables = torch.zeros((len(work), max(widths)), dtype=i32)
    for row, width in enumerate(widths):
        tables[row, :width] = torch.tensor([deal.pop() for _ in range(width)], dtype=i32)
    return Rows(
        positions=torch.cat([torch.arange(start, start + count) for start, count in work]),
        row_of=torch.repeat_interleave(torch.arange(len(work)), counts).to(i32),
        tables=tables,
        query_start=torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).to(i32),
        context=context.to(i32),
        block_size=block_size,
    )


def textbook_attention(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, window: int = 10**6, cap: float = 1e9
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // kv.shape[3]
    for token, (row, last) in enumerate(zip(rows.row_of.tolist(), rows.positions.tolist(), strict=True)):
        spots = torch.arange(max(0, last + 1 - window), last + 1)
        keys, values = kv[:, rows.tables[row].long()[spots // rows.block_size], spots % rows.block_size].double()
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[token, head].double() * scale
            weights = torch.softmax(cap * torch.tanh(scores / cap), 0)
            out[token, head] = weights @ values[:, head // group]
    return out


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (33, 50), (576, 130), (1, 7)])
def test_linear_and_embed_match_the_matrix_they_packed(count: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(count)
    x, w, bias = torch.randn(count, num_in), torch.randn(num_out, num_in), torch.randn(num_out)
    packed = OPS.pack(w)
    wanted = x.double() @ w.double().t()
    bound = 1e-5 * math.sqrt(num_in)
    assert (OPS.linear(x, packed, None, num_out) - wanted).abs().max() <= bound
    assert (OPS.linear(x, packed, bias, num_out) - (wanted + bias)).abs().max() <= bound
    tokens = torch.randint(0, num_out, (count,))
    assert torch.equal(OPS.embed(packed, tokens), w[tokens])


@pytest.mark.parametrize("shape", [(1, 64), (17, 33), (5, 3, 16)])
def test_rms_norm_matches_textbook(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert (OPS.rms_norm(x, weight, 1e-5) - wanted).abs().max() <= 1e-5


def test_rope_turns_halves_in_place_inside_a_fused_row() -> None:
    fused = torch.randn(9, 7, 16)
    before = fused.clone()
    positions = torch.randint(0, 50, (9,))
    angles = torch.rand(50, 8) * 6
    OPS.rope(fused[:, :4], fused[:, 4:6], positions, angles.cos(), angles.sin())
    turn = angles[positions].double()[:, None]
    a, b = before[:, :6].double().chunk(2, -1)
    wanted = torch.cat((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()), -1)
    assert (fused[:, :6] - wanted).abs().max() <= 1e-5
    assert torch.equal(fused[:, 6:], before[:, 6:])


def test_rope_turns_the_first_numbers_of_a_head_alone() -> None:
    q, k = torch.randn(5, 3, 10), torch.randn(5, 1, 10)
    parts = q[..., :6].clone(), k[..., :6].clone()
    before, angles, positions = q.clone(), torch.randn(9, 3), torch.tensor([8, 0, 3, 3, 1])
    OPS.rope(q, k, positions, angles.cos(), angles.sin())
    OPS.rope(*parts, positions, angles.cos(), angles.sin())
    assert torch.equal(q[..., :6], parts[0])
    assert torch.equal(k[..., :6], parts[1])
    assert torch.equal(q[..., 6:], before[..., 6:])


def test_write_kv_touches_its_cells_only() -> None:
    kv = torch.randn(2, 5, 4, 2, 8)
    before = kv.clone()
    fused = torch.randn(3, 6, 8)
    slots = torch.tensor([19, 0, 7])
    OPS.write_kv(fused[:, 2:4], fused[:, 4:], kv, slots)
    flat = kv.view(2, 20, 2, 8)
    assert torch.equal(flat[0, slots], fused[:, 2:4])
    assert torch.equal(flat[1, slots], fused[:, 4:])
    others = [cell for cell in range(20) if cell not in slots]
    assert torch.equal(flat[:, others], before.view(2, 20, 2, 8)[:, others])


def test_silu_mul_matches_textbook_also_far_out() -> None:
    x = torch.cat((torch.randn(5, 66) * 4, torch.full((1, 66), -200.0), torch.full((1, 66), 200.0)))
    gate, up = x.double().chunk(2, -1)
    got = OPS.silu_mul(x)
    assert got.shape == (7, 33)
    assert ((got - torch.nn.functional.silu(gate) * up).abs() <= 1e-5 * (1 + (gate * up).abs())).all()


def test_gelu_mul_matches_textbook_also_far_out() -> None:
    x = torch.cat((torch.randn(5, 66) * 4, torch.full((1, 66), -200.0), torch.full((1, 66), 200.0)))
    gate, up = x.double().chunk(2, -1)
    wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert ((OPS.gelu_mul(x) - wanted).abs() <= 1e-5 * (1 + (gate * up).abs())).all()


def test_layer_norm_and_gelu_match_textbook_also_far_out() -> None:
    x = torch.cat((torch.randn(5, 66) * 4 + 1, torch.full((1, 66), -200.0), torch.full((1, 66), 200.0)))
    weight, bias = torch.randn(66), torch.randn(66)
    assert OPS.layer_norm is not None
    assert OPS.gelu is not None
    wanted = torch.nn.functional.layer_norm(x.double(), (66,), weight.double(), bias.double(), 1e-12)
    got = OPS.layer_norm(x, weight, bias, 1e-12)
    assert (got - wanted)[:5].abs().max() <= 1e-5
    assert torch.equal(OPS.layer_norm(x[3:4], weight, bias, 1e-12)[0], got[3])
    assert (OPS.gelu(x) - torch.nn.functional.gelu(x.double())).abs().max() <= 2e-6
    assert torch.equal(OPS.gelu(x[3:4, 1:].contiguous())[0], OPS.gelu(x)[3, 1:])


def test_soft_cap_matches_textbook_also_far_out() -> None:
    x = torch.cat((torch.randn(70) * 30, torch.tensor([0.0, -0.0, 1e9, -1e9, float("inf"), -float("inf"), 1e-3])))
    assert (OPS.soft_cap(x, 30.0) - 30 * torch.tanh(x.double() / 30)).abs().max() <= 1e-5
    assert OPS.soft_cap(torch.tensor([float("nan")]), 30.0).isnan().all()


@pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (5, 2.0), (128, 0.0), (129, 2.0), (1000, 2.0)])
def test_attention_within_a_window_and_a_cap_matches_textbook(window: int, cap: float) -> None:
    torch.manual_seed(window)
    rows = make_rows([(0, 1), (300, 1), (0, 40), (7, 1), (120, 200), (127, 1)], 16, 800)
    kv = torch.randn(2, 800, 16, 2, 24)
    q = torch.randn(len(rows.positions), 6, 24)
    got = OPS.attention(q, kv, rows, 24**-0.5, window, cap)
    assert (got - textbook_attention(q, kv, rows, 24**-0.5, window, cap or 1e9)).abs().max() <= 1e-5


@pytest.mark.parametrize("block_size", [1, 8, 16, 24])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 16), (3, 3, 10), (8, 1, 64), (4, 2, 128)])
def test_attention_matches_textbook(block_size: int, heads: int, kv_heads: int, width: int) -> None:
    torch.manual_seed(block_size)
    rows = make_rows([(0, 1), (140, 1), (0, 40), (7, 1), (120, 20), (127, 1), (128, 1)], block_size, 800)
    kv = torch.randn(2, 800, block_size, kv_heads, width)
    q = torch.randn(len(rows.positions), heads, width)
    got = OPS.attention(q, kv, rows, width**-0.5)
    assert got.is_contiguous()
    assert (got - textbook_attention(q, kv, rows, width**-0.5)).abs().max() <= 1e-5


def test_attention_never_reads_past_the_context() -> None:
    rows = make_rows([(0, 5), (30, 1), (100, 60)], 16, 30)
    kv = torch.randn(2, 30, 16, 2, 16)
    q = torch.randn(len(rows.positions), 4, 16)
    wanted = OPS.attention(q, kv, rows, 0.25)
    poisoned = torch.full_like(kv, float("nan"))
    for row, context in enumerate(rows.context.tolist()):
        for p in range(context):
            cell = (slice(None), int(rows.tables[row, p // 16]), p % 16)
            poisoned[cell] = kv[cell]
    assert torch.equal(OPS.attention(q, poisoned, rows, 0.25), wanted)


def test_attention_takes_views_of_a_fused_row() -> None:
    rows = make_rows([(3, 1), (0, 7)], 4, 10)
    kv = torch.randn(2, 10, 4, 1, 8)
    fused = torch.randn(8, 5, 8)
    assert torch.equal(OPS.attention(fused[:, :3], kv, rows, 0.3), OPS.attention(fused[:, :3].clone(), kv, rows, 0.3))


def test_many_long_rows_are_gathered_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows([(10 * i, 1) for i in range(12)], 8, 200)
    kv = torch.randn(2, 200, 8, 2, 16)
    q = torch.randn(12, 4, 16)
    wanted = OPS.attention(q, kv, rows, 0.25)
    monkeypatch.setattr(ref_kv, "GATHER_FLOATS", 300 * 32)
    assert torch.equal(OPS.attention(q, kv, rows, 0.25), wanted)


@pytest.mark.parametrize("num_in", [33, 60, 64, 577])
def test_a_row_has_the_same_bits_in_every_place_and_batch(num_in: int) -> None:
    torch.manual_seed(num_in)
    w, row = OPS.pack(torch.randn(77, num_in)), torch.randn(num_in)
    weight, wide = torch.randn(num_in), torch.randn(2 * num_in) * 3
    for count in (1, 2, 15, 16, 17, 33, 100):
        for place in {0, count // 2, count - 1}:
            x, gates = torch.randn(count, num_in), torch.randn(count, 2 * num_in)
            x[place], gates[place] = row, wide
            assert torch.equal(OPS.linear(x, w, None, 77)[place], OPS.linear(row[None], w, None, 77)[0])
            assert torch.equal(OPS.rms_norm(x, weight, 1e-5)[place], OPS.rms_norm(row[None], weight, 1e-5)[0])
            assert torch.equal(OPS.silu_mul(gates)[place], OPS.silu_mul(wide[None])[0])


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


many_threads = pytest.mark.parametrize("threads", [16], indirect=True)


@pytest.mark.parametrize("threads", [1, 2, 8], indirect=True)
@pytest.mark.parametrize("width", [9, 10, 16, 20, 64])
@pytest.mark.parametrize("group", [1, 3, 5, 6, 9])
def test_a_query_has_the_same_bits_alone_and_in_a_batch(threads: int, group: int, width: int) -> None:
    rows = make_rows([(0, 40)], 16, 3)
    kv = torch.randn(2, 3, 16, 2, width)
    q = torch.randn(40, 2 * group, width)
    whole = OPS.attention(q, kv, rows, width**-0.5)
    assert whole.shape == q.shape
    for place in (0, 1, 5, 38):
        for count in (1, 2, 7):
            part = slice(place, min(place + count, 40))
            some = make_rows([(place, part.stop - place)], 16, 3)
            some.tables[0] = rows.tables[0, : some.tables.shape[1]]
            assert torch.equal(OPS.attention(q[part], kv, some, width**-0.5), whole[part])
    assert torch.get_num_threads() == threads


@many_threads
def test_uneven_shares_of_many_threads_change_no_bit(threads: int) -> None:
    w, row = torch.randn(4864, 896), torch.randn(4864)
    linear = ref.TiledLinear()
    wanted = linear(row[None], w, None, 896)[0]
    for place in (3, 7, 12, 15):
        x = torch.randn(16, 4864)
        x[place] = row
        assert torch.equal(linear(x, w, None, 896)[place], wanted)
    assert torch.get_num_threads() == threads


@many_threads
def test_product_whose_place_matters_runs_on_one_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ref, "place_matters", lambda w: True)
    seen = []
    multiply = ref._multiply

    def spy(x: Tensor, w: Tensor, out: int) -> Tensor:
        seen.append(torch.get_num_threads())
        return multiply(x, w, out)

    monkeypatch.setattr(ref, "_multiply", spy)
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    assert torch.allclose(ref.TiledLinear()(x, w, None, 5), x @ w, atol=1e-5)
    assert seen == [1]
    assert torch.get_num_threads() == threads
