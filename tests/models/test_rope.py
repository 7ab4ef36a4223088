"""Rotary tables bit for bit as torch gives them, with which the models were made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_packing
from headway.layers.rope import rope_table
from headway.models.spec import RopeScaling

SCALINGS = [
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("linear", 3.3),
    RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
]
HAS_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Where torch takes powers one by one it rounds some of them differently."""


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [2, 10, 16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 1e5, 1.3e5, 1.5e5, 5e5, 1e6, 5e6, 1e7])
def test_tables_of_known_models_are_those_of_torch(theta: float, head_dim: int, scaling: RopeScaling | None) -> None:
    mine, wanted = (table(head_dim, 300, theta, scaling) for table in (rope_table, torch_packing.rope_table))
    for side, other in zip(mine, wanted, strict=True):
        assert side.dtype == np.float32
        if HAS_VECTORS:
            assert np.array_equal(side, other.numpy())
        np.testing.assert_allclose(side, other.numpy(), rtol=0, atol=300 * 2**-22)


def test_long_tables_are_those_of_torch() -> None:
    mine, wanted = rope_table(128, 40_000, 5e5, None), torch_packing.rope_table(128, 40_000, 5e5, None)
    for side, other in zip(mine, wanted, strict=True):
        assert np.array_equal(side, other.numpy())


@pytest.mark.parametrize("theta", [12345.678, 2e6, 7.5e7])
def test_other_frequencies_are_at_most_a_rounding_away(theta: float) -> None:
    mine = rope_table(128, 2, theta, None).sin[1]
    wanted = torch_packing.rope_table(128, 2, theta, None)[1][1].numpy()
    np.testing.assert_allclose(mine, wanted, rtol=2**-22)


def test_an_entry_does_not_depend_on_the_length_of_the_table() -> None:
    short, long = rope_table(64, 100, 1e5, None), rope_table(64, 2500, 1e5, None)
    assert np.array_equal(short.cos, long.cos[:100])
    assert np.array_equal(short.sin, long.sin[:100])
