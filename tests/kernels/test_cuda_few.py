"""Products of few rows and what is fused behind them: on a device the bits of the separate kernels, elsewhere close."""

from __future__ import annotations

import pytest
import torch

from cuda_kit import DEVICE, IS_CUDA, LAUNCH
from headway.kernels.cuda import few
from headway.kernels.cuda.kernels import TritonKernels
from headway.kernels.cuda.ops import Heads, KVCells, Scaled
from headway.kernels.cuda.products import fix_order
from headway.layers.rope import rope_table

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

# Triton's interpreter has no right bfloat16 products.
DTYPE = torch.bfloat16 if IS_CUDA else torch.float32
ROWS = (1, 5, 17, 32) if IS_CUDA else (3,)


@pytest.fixture(autouse=True)
def _order() -> None:
    if IS_CUDA:
        fix_order()


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got, wanted) if IS_CUDA else torch.allclose(got, wanted, atol=1e-4)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def separate() -> TritonKernels:
    """The same operations without fusing: as many rows have them."""
    kernels = TritonKernels(LAUNCH)
    kernels._are_few = lambda x: False  # type: ignore[method-assign]
    return kernels


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", [(192, 512), (100, 320)] + ([(4096, 14336), (2048, 8192)] if IS_CUDA else []))
def test_a_product_of_few_rows_is_that_of_many(rows: int, sizes: tuple[int, int]) -> None:
    w, x = random(*sizes, scale=0.05), random(rows, sizes[1])
    out = torch.full((rows, sizes[0]), float("nan"), dtype=DTYPE, device=DEVICE)
    few.product(x, w, out, LAUNCH)
    many = torch.empty(64, sizes[0], dtype=DTYPE, device=DEVICE)
    separate().linear(Scaled(torch.cat((x, random(64 - rows, sizes[1])))), Scaled(w), many)
    assert same(out, many[:rows])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", [(96, 256)] + ([(14336, 4096)] if IS_CUDA else []))
def test_silu_behind_gate_and_up(rows: int, sizes: tuple[int, int]) -> None:
    inner, hidden = sizes
    w, x = random(2 * inner, hidden, scale=0.05), random(rows, hidden)
    between = torch.empty(rows, 2 * inner, dtype=DTYPE, device=DEVICE)
    got, wanted = (torch.full((rows, inner), float("nan"), dtype=DTYPE, device=DEVICE) for _ in range(2))
    few.gate_up_silu(x, w, got, LAUNCH)
    separate().gate_up(Scaled(x), Scaled(w), between, Scaled(wanted))
    assert same(got, wanted)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [Heads(6, 2, 64, 16), Heads(4, 1, 128, 16)], ids=str)
def test_rotary_positions_and_cells_behind_qkv(rows: int, heads: Heads) -> None:
    hidden, width = 256, (heads.num + 2 * heads.kv) * heads.dim
    w, x = random(width, hidden, scale=0.05), random(rows, hidden)
    rope = tuple(torch.from_numpy(table).to(DEVICE) for table in rope_table(heads.dim, 64, 10000.0, None))
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE) + 9
    cells = torch.randperm(5 * 16)[:rows].to(DEVICE, torch.int32)
    cells[rows // 2] = -1
    results = []
    for run in (few.qkv_rope, None):
        qkv = torch.zeros(rows, width, dtype=DTYPE, device=DEVICE)
        kv = torch.zeros(2, 5, heads.block_size, heads.kv, heads.dim, dtype=DTYPE, device=DEVICE)
        layer = KVCells(kv[0], kv[1])
        if run is None:
            separate().qkv(Scaled(x), Scaled(w), qkv, None, None, rope, positions, cells, layer, heads, 1e-5)  # type: ignore[arg-type]
        else:
            run(x, w, qkv, rope, positions, cells, layer, heads, LAUNCH)  # type: ignore[arg-type]
        results.append((qkv[:, : heads.num * heads.dim], kv))
    assert same(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])
    assert int((results[0][1].abs().sum((0, 3, 4)) > 0).sum()) == rows - 1


@pytest.mark.skipif(not IS_CUDA, reason="the library is the device's")
@pytest.mark.parametrize("sizes", [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 14336)])
def test_a_row_has_one_product_whatever_the_library_would_do(sizes: tuple[int, int]) -> None:
    kernels, w = TritonKernels(LAUNCH), random(*sizes, scale=0.05)
    x = random(1000, sizes[1])
    wanted = torch.empty(16, sizes[0], dtype=DTYPE, device=DEVICE)
    few.product(x[:16], w, wanted, LAUNCH)
    for rows in (16, 32, 48, 64, 96, 100, 128, 160, 256, 512, 1000):
        out = torch.full((rows, sizes[0]), float("nan"), dtype=DTYPE, device=DEVICE)
        kernels.linear(Scaled(x[:rows]), Scaled(w), out)
        assert torch.equal(out[:16], wanted), (rows, kernels._is_exact)
        assert torch.isfinite(out).all()


def test_a_product_is_padded_to_rows_that_the_library_adds_up_in_our_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def is_exact(self: TritonKernels, rows: int, dtype: torch.dtype, w: torch.Tensor) -> bool:
        tried.append(rows)
        return rows == 72

    monkeypatch.setattr(TritonKernels, "_is_library_exact", is_exact)
    kernels, x, w = separate(), random(80, 64), random(48, 64, scale=0.1)
    out = torch.zeros((80, 48), dtype=DTYPE, device=DEVICE)
    product = kernels.linear(Scaled(x[:40]), Scaled(w), out[:40])
    assert tried == [40, 72]
    assert product.values.shape == (40, 48)
    assert same(out[:72], torch.mm(x[:72], w.t()))
    assert not out[72:].any(), "no more is written than was tried out"
    assert kernels._library_rows(x[:40], w, out[:40]) == 72
    assert kernels._library_rows(x[10:50], w, out[:40]) is None, "there are 70 rows from the tenth on"


@pytest.mark.parametrize("sizes", [(100, 72), (64, 320)])
def test_a_float32_product_is_right_and_one_for_any_number_of_rows(sizes: tuple[int, int]) -> None:
    w, x = torch.randn(sizes, device=DEVICE), torch.randn(70, sizes[1], device=DEVICE)
    outs = {}
    for rows in (1, 33, 70):
        outs[rows] = torch.full((rows, sizes[0]), float("nan"), device=DEVICE)
        few.float32_product(x[:rows], w, outs[rows], LAUNCH)
    assert torch.allclose(outs[70].double(), x.double() @ w.double().t(), atol=1e-4)
    assert torch.equal(outs[1], outs[70][:1])
    assert torch.equal(outs[33], outs[70][:33])


@pytest.mark.skipif(not IS_CUDA, reason="the library's order of addition is the device's own")
def test_every_number_of_rows_has_the_bits_of_few() -> None:
    kernels, x = TritonKernels(LAUNCH), random(640, 4096)
    for outputs in (4096, 6144):
        w, out, wanted = random(outputs, 4096, scale=0.02), random(640, outputs), random(640, outputs)
        few.product(x, w, wanted, LAUNCH)
        for rows in range(64, 577, 32):
            kernels.linear(Scaled(x[:rows]), Scaled(w), out[:rows])
            assert torch.equal(out[:rows], wanted[:rows]), rows
