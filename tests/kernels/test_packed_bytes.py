"""Packed matrices byte for byte as plain torch packs them: a cache file made by either serves the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import torch_packing
from headway.kernels import pack, pack_q4
from headway.kernels.checks import Array
from headway.kernels.packings import PACKINGS

SHAPES = [(1, 1), (5, 3), (16, 32), (48, 64), (49, 65), (97, 130), (200, 77), (144, 576), (33, 31), (1000, 600)]
ORACLES = {
    "float32": torch_packing.pack_f32,
    "bfloat16": torch_packing.pack_bf16,
    "int8": torch_packing.pack_i8,
    "q4": torch_packing.pack_q4,
}
FINITE: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "ordinary": lambda w, rng: w,
    "rows of every size": lambda w, rng: w * 10.0 ** rng.integers(-30, 4, (len(w), 1)),
    "too small to divide by": lambda w, rng: w * 1e-37,
    "subnormal": lambda w, rng: w * 1e-40,
    # Zeros of one sign: which of two the smallest of a group is, torch leaves to the width of its vectors.
    "rows of zeros": lambda w, rng: np.where(np.arange(len(w))[:, None] % 3 > 0, w, 0.0),
    "zeros of both signs": lambda w, rng: np.where(w > 0, w, -0.0),
    "half way": lambda w, rng: np.round(w * 8) / 8 * 1.00390625,
    "equal weights": lambda w, rng: np.full_like(w, 0.3),
    "half way between bytes": lambda w, rng: np.round(w * 20).clip(-63, 63) + 0.5 * (np.abs(w) < 1),
}
BROKEN = {"a NaN": (np.nan,), "infinities": (np.inf, -np.inf)}


def matrix(shape: tuple[int, int], case: str) -> Array:
    rng = np.random.default_rng(7)
    return FINITE[case](rng.standard_normal(shape), rng).astype(np.float32)


def as_bytes(packed: Array) -> bytes:
    return np.ascontiguousarray(packed).tobytes()


@pytest.mark.parametrize("case", FINITE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", PACKINGS)
def test_a_matrix_has_the_bytes_of_torch(dtype: str, shape: tuple[int, int], case: str) -> None:
    w = matrix(shape, case)
    wanted = ORACLES[dtype](torch.from_numpy(w.copy())).numpy()
    assert as_bytes(PACKINGS[dtype].pack(w)) == as_bytes(wanted)


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_matrix_that_is_not_finite_has_them_too(dtype: str, shape: tuple[int, int], case: str) -> None:
    w = matrix(shape, "ordinary")
    for place, value in enumerate(BROKEN[case]):
        w[len(w) // (place + 2), place :: max(1, shape[1] // 3)] = value
    wanted = ORACLES[dtype](torch.from_numpy(w.copy())).numpy()
    assert as_bytes(PACKINGS[dtype].pack(w)) == as_bytes(wanted)


def test_memory_in_another_order_is_packed_alike() -> None:
    w = matrix((70, 130), "ordinary")
    for packing in PACKINGS.values():
        assert as_bytes(packing.pack(np.asfortranarray(w))) == as_bytes(packing.pack(w))


@pytest.mark.parametrize("shape", [(1, 32), (48, 64), (97, 96), (200, 576)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-9, 3e4])  # halves that are normal, subnormal, zero, nearly too large
def test_groups_have_the_bytes_of_torch(shape: tuple[int, int], scale: float) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(16, size=shape, dtype=np.uint8)
    d, m = (rng.uniform(-scale, scale, (shape[0], shape[1] // 32)).astype(np.float32) for _ in range(2))
    halves = [side.astype(np.float16).astype(np.float32) for side in (d, m)]
    for sides in ((d, m), halves):
        tensors = [torch.from_numpy(side) for side in (q, *sides)]
        assert as_bytes(pack_q4.pack_groups(q, *sides)) == as_bytes(torch_packing.pack_groups(*tensors).numpy())
        assert as_bytes(pack_q4.pack_exactly(q, *sides)) == as_bytes(torch_packing.pack_exactly(*tensors).numpy())


def test_a_row_is_divided_as_torch_divides() -> None:
    w = matrix((4000, 16), "rows of every size")
    scale, whole = torch_packing.quantize_rows(torch.from_numpy(w))
    mine = pack.quantize_rows(w)
    assert np.array_equal(mine[0], scale.numpy())
    assert np.array_equal(mine[1], whole.numpy())
