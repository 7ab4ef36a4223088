"""The KV formats: native kernels against the plain-torch oracle, and bits that depend only on their own row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headway.errors import EngineError
from headway.kernels import ref
from headway.kernels.kv_format import FP16, INT8, KV_FORMATS, KVFormat, format_of
from headway.kernels.ops import KernelSet
from headway.kernels.ref_kv import narrow, widen
from torch_kernels import arrays, dtype_of, of_tensors

Load = Callable[[int, str], KernelSet]
NAN = float("nan")

each_format = pytest.mark.parametrize("kind", KV_FORMATS, ids=lambda kind: kind.name)


@dataclass(frozen=True, slots=True)
class Rows:
    """A step as attention sees it."""

    positions: Tensor
    row_of: Tensor
    tables: Tensor
    query_start: Tensor
    context: Tensor
    block_size: int


def make_rows(work: list[tuple[int, int]], block_size: int, spare: int = 3) -> tuple[Rows, int]:
    """A step of rows (first position, queries) over shuffled blocks, and the size of the pool."""
    ends = [start + count for start, count in work]
    widths = [-(-end // block_size) for end in ends]
    num_blocks = sum(widths) + spare
    deal = torch.randperm(num_blocks).int().split([*widths, spare])
    counts = torch.tensor([count for _, count in work])
    rows = Rows(
        positions=torch.cat([torch.arange(start, end) for (start, _), end in zip(work, ends, strict=True)]),
        row_of=torch.repeat_interleave(torch.arange(len(work)), counts).int(),
        tables=torch.nn.utils.rnn.pad_sequence(list(deal[:-1]), batch_first=True),
        query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        context=torch.tensor(ends).int(),
        block_size=block_size,
    )
    return rows, num_blocks


def make_kv(rows: Rows, num_blocks: int, kv_heads: int, dim: int, kind: KVFormat) -> Tensor:
    """A layer whose every cell is broken, but for those the rows may see."""
    kv = narrow(torch.full((2, num_blocks, rows.block_size, kv_heads, dim), NAN), dtype_of(kind))
    for table, context in zip(rows.tables.long(), rows.context.tolist(), strict=True):
        spots = torch.arange(context)
        cells = table[spots // rows.block_size], spots % rows.block_size
        kv[:, cells[0], cells[1]] = narrow(torch.randn(2, context, kv_heads, dim), dtype_of(kind))
    return kv


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@each_format
@pytest.mark.parametrize("dim", [8, 16, 50, 64, 80, 128])
def test_written_cells_are_those_of_the_oracle_and_no_other(sets: list[KernelSet], kind: KVFormat, dim: int) -> None:
    fused = torch.randn(40, 4 * dim + 5) * torch.logspace(-6, 4, 40)[:, None]
    fused[3] = 0.0
    k, v = fused[:, : 2 * dim].unflatten(1, (2, dim)), fused[:, 2 * dim : 4 * dim].unflatten(1, (2, dim))
    slots = torch.randperm(10 * 8)[:40]
    expected = torch.zeros(2, 10, 8, 2, kind.head_size(dim), dtype=dtype_of(kind))
    of_tensors(ref.load()).write_kv(k, v, expected, slots)
    assert torch.allclose(widen(expected).flatten(1, 2)[0, slots], k, rtol=1e-3, atol=float(k.abs().max()) / 250)
    for kernels in sets:
        kv = torch.zeros_like(expected)
        kernels.write_kv(k, v, kv, slots)
        assert torch.equal(bits(kv), bits(expected))


def test_halves_round_to_nearest_even_at_every_level(sets: list[KernelSet]) -> None:
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    between = (every[:-1] + every[1:]) / 2
    edges = torch.tensor([65519.996, 65520.0, 1e30, 1e-45, 2.0**-25, 2.0**-25 * 1.0001, torch.inf])
    x = torch.cat((every, between, between.nextafter(every[:-1]), between.nextafter(every[1:]), edges))
    x = torch.cat((x, -x))
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 1, 64)
    slots = torch.arange(len(x))
    for kernels in sets:
        kv = torch.zeros(2, 1, len(x), 1, 64, dtype=torch.float16)
        kernels.write_kv(x, x, kv, slots)
        assert torch.equal(bits(kv[0, 0]), bits(x.half()))


def test_every_half_is_read_as_what_it_is(sets: list[KernelSet]) -> None:
    every = torch.arange(-0x8000, 0x8000).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()].view(-1, 1, 64)
    kv = torch.stack((torch.zeros_like(finite), finite)).unsqueeze(2)
    alone = Rows(torch.zeros(1).long(), torch.zeros(1).int(), *(torch.empty(0),) * 3, block_size=1)
    for kernels in sets:
        for block in range(0, len(finite), 31):
            rows = Rows(alone.positions, alone.row_of, torch.tensor([[block]]).int(), alone.tables, alone.tables, 1)
            assert torch.equal(kernels.attention(torch.zeros(1, 1, 64), kv, rows, 1.0)[0], finite[block].float())


def test_bytes_keep_a_head_within_half_a_step() -> None:
    x = torch.randn(300, 64) * torch.logspace(-30, 30, 300)[:, None]
    assert ((widen(narrow(x, dtype_of(INT8))) - x).abs() <= x.abs().amax(-1, keepdim=True) / 254 * 1.0001).all()
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.49]])
    assert widen(narrow(ties, dtype_of(INT8))).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -126.0, 0.0]]


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 5e-44, 2e-43, 1e-40, 1e-38])
def test_heads_at_the_edge_of_zero_stay_finite(sets: list[KernelSet], tiny: float) -> None:
    x = torch.full((1, 1, 16), tiny)
    expected = torch.zeros(2, 1, 1, 1, 20, dtype=torch.uint8)
    of_tensors(ref.load()).write_kv(x, x, expected, torch.tensor([0]))
    assert widen(expected).isfinite().all()
    for kernels in sets:
        kv = torch.zeros_like(expected)
        kernels.write_kv(x, x, kv, torch.tensor([0]))
        assert torch.equal(kv, expected)


@each_format
@pytest.mark.parametrize("fault", [NAN, torch.inf, -torch.inf])
def test_a_broken_head_is_seen_by_its_own_row_alone(sets: list[KernelSet], kind: KVFormat, fault: float) -> None:
    rows, num_blocks = make_rows([(70, 1), (70, 1), (0, 3)], 16)
    kv = make_kv(rows, num_blocks, 2, 64, kind)
    q, new = torch.randn(5, 4, 64), torch.randn(1, 2, 64)
    hurt = new.clone()
    hurt[0, 1, 17] = fault
    cell = rows.tables[1, 2].long() * 16 + torch.tensor([5])
    for kernels in [of_tensors(ref.load()), *sets]:
        kernels.write_kv(new, new, kv, cell)
        clean = kernels.attention(q, kv, rows, 0.125)
        assert clean.isfinite().all()
        kernels.write_kv(hurt, hurt, kv, cell)
        got = kernels.attention(q, kv, rows, 0.125)
        assert got[1, 2:].isnan().any(-1).all()
        assert torch.equal(got[1, :2], clean[1, :2])
        keep = torch.tensor([0, 2, 3, 4])
        assert torch.equal(got[keep], clean[keep])


@each_format
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 5])
def test_attention_matches_the_oracle(sets: list[KernelSet], kind: KVFormat, dim: int, group: int) -> None:
    work = [(0, 1), (62, 1), (63, 1), (64, 1), (127, 1), (130, 1), (58, 22), (0, 9), (255, 2)]
    for block_size in (1, 16, 300):
        rows, num_blocks = make_rows(work, block_size)
        kv = make_kv(rows, num_blocks, 2, dim, kind)
        q = torch.randn(len(rows.positions), 2 * group, dim) * 2
        expected = of_tensors(ref.load()).attention(q, kv, rows, dim**-0.5)
        assert expected.isfinite().all()
        for kernels in sets:
            assert float((kernels.attention(q, kv, rows, dim**-0.5) - expected).abs().max()) < 5e-6


@each_format
def test_oracle_attends_over_what_was_kept(kind: KVFormat) -> None:
    rows, num_blocks = make_rows([(40, 1), (0, 7)], 16)
    kv = make_kv(rows, num_blocks, 2, 64, kind)
    q = torch.randn(8, 6, 64)
    wide = widen(kv)
    assert torch.equal(
        of_tensors(ref.load()).attention(q, kv, rows, 0.125), of_tensors(ref.load()).attention(q, wide, rows, 0.125)
    )


@each_format
def test_bits_ignore_other_rows_chunking_and_where_blocks_lie(sets: list[KernelSet], kind: KVFormat) -> None:
    rows, num_blocks = make_rows([(0, 150), (70, 1), (200, 2), (3, 1)], 16)
    kv = make_kv(rows, num_blocks, 2, 64, kind)
    total = len(rows.positions)
    q = torch.randn(total, 6, 64)
    order = torch.randperm(num_blocks)
    moved = torch.empty_like(kv)
    moved[:, order] = kv
    tables = order[rows.tables.long()].int()
    for kernels in [of_tensors(ref.load()), *sets]:
        whole = kernels.attention(q, kv, rows, 0.125)
        for chunk in (1, 5, 8, 64):
            for begin in range(0, total, chunk):
                part = slice(begin, begin + chunk)
                row_of, counts = rows.row_of[part].unique_consecutive(return_counts=True)
                some = Rows(
                    positions=rows.positions[part],
                    row_of=torch.repeat_interleave(torch.arange(len(counts)), counts).int(),
                    tables=tables[row_of.long()],
                    query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
                    context=rows.positions[part][counts.cumsum(0) - 1].int() + 1,
                    block_size=16,
                )
                assert torch.equal(kernels.attention(q[part], moved, some, 0.125), whole[part])


@each_format
def test_bits_ignore_the_size_of_blocks(sets: list[KernelSet], kind: KVFormat) -> None:
    """A block as long as the context is a contiguous cache."""
    small, num_blocks = make_rows([(0, 20), (300, 1), (63, 2)], 16, spare=0)
    kv = make_kv(small, num_blocks, 3, 64, kind)
    large = Rows(
        small.positions, small.row_of, torch.arange(3).int().view(3, 1), small.query_start, small.context, 8192
    )
    whole = narrow(torch.full((2, 3, 8192, 3, 64), NAN), dtype_of(kind))
    for row in range(3):
        cells = kv[:, small.tables[row].long()].flatten(1, 2)
        whole[:, row, : cells.shape[1]] = cells
    q = torch.randn(23, 9, 64)
    for kernels in sets:
        assert torch.equal(kernels.attention(q, whole, large, 0.125), kernels.attention(q, kv, small, 0.125))


def run(kernels: KernelSet, kind: KVFormat, dim: int) -> list[Tensor]:
    """Writing and attending, big enough to be split over threads, heads in uneven shares."""
    torch.manual_seed(5)
    rows, num_blocks = make_rows([(0, 40), (333, 1), (64, 2), (130, 1), (9, 1)], 16)
    kv = make_kv(rows, num_blocks, 3, dim, kind)
    k, v, q = torch.randn(45, 3, dim), torch.randn(45, 3, dim), torch.randn(45, 9, dim)
    slots = rows.tables[rows.row_of.long(), rows.positions // 16].long() * 16 + rows.positions % 16
    kernels.write_kv(k, v, kv, slots)
    return [bits(kv), bits(kernels.attention(q, kv, rows, dim**-0.5))]


@each_format
@pytest.mark.parametrize("dim", [64, 72])
def test_bits_ignore_threads_and_the_wide_levels(levels: list[str], load: Load, kind: KVFormat, dim: int) -> None:
    wide: list[list[Tensor]] = []
    for level in levels:
        alone = run(load(1, level), kind, dim)
        for threads in (2, 3, 7):
            assert all(torch.equal(a, b) for a, b in zip(run(load(threads, level), kind, dim), alone, strict=True))
        if level != "generic":
            wide.append(alone)
    for result in wide[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, wide[0], strict=True))


@each_format
def test_cells_of_zero_bytes_are_zeros(sets: list[KernelSet], kind: KVFormat) -> None:
    rows, num_blocks = make_rows([(20, 1)], 16)
    kv = torch.zeros(2, num_blocks, 16, 1, kind.head_size(64), dtype=dtype_of(kind))
    for kernels in [of_tensors(ref.load()), *sets]:
        assert not kernels.attention(torch.randn(1, 2, 64), kv, rows, 0.125).any()


def test_layers_of_another_kind_are_refused(sets: list[KernelSet]) -> None:
    rows, num_blocks = make_rows([(3, 1)], 16)
    q, k = torch.randn(1, 2, 64), torch.randn(1, 1, 64)
    wrong = {
        "float64": torch.zeros(2, num_blocks, 16, 1, 64, dtype=torch.float64),
        r"needed is contiguous uint8 .* KVH, 68": torch.zeros(2, num_blocks, 16, 1, 64, dtype=torch.uint8),
        r"needed is contiguous float16 .* KVH, 64": torch.zeros(2, num_blocks, 16, 1, 68).half(),
        "needed is contiguous": torch.zeros(num_blocks, 2, 16, 1, 64).transpose(0, 1),
    }
    for kernels in sets:
        for message, kv in wrong.items():
            with pytest.raises(EngineError, match=message):
                kernels.attention(q, kv, rows, 1.0)
            with pytest.raises(EngineError, match=message):
                kernels.write_kv(k, k, kv, torch.tensor([0]))


def test_a_format_knows_its_tensor_and_its_bytes() -> None:
    assert [format_of(arrays(torch.empty(0, dtype=dtype_of(kind)))) for kind in KV_FORMATS] == list(KV_FORMATS)
    assert [kind.head_bytes(64) for kind in KV_FORMATS] == [256, 128, 68]
    assert FP16.head_size(64) == 64
