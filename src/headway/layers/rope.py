"""Cosine and sine tables for rotary embeddings, from a base and an optional scaling of the frequencies."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RopeScalingLike(Protocol):
    """`linear` divides every frequency by the factor; `llama3` only those with a wavelength beyond the old context."""

    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def original_max_len(self) -> int: ...


class RopeTable(NamedTuple):
    cos: Tensor  # [max_len, head_dim / 2]
    sin: Tensor  # [max_len, head_dim / 2]


def rope_table(head_dim: int, max_len: int, theta: float, stretch: RopeScalingLike | None) -> RopeTable:
    """Angles in float32, as the models were trained with; their cosines rounded from float64, so that an entry does
    not depend on the length of the table."""
    freqs = _frequencies(head_dim, theta, stretch)
    angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(1) * freqs
    wide = angles.double()
    return RopeTable(wide.cos().float(), wide.sin().float())


def _frequencies(head_dim: int, theta: float, stretch: RopeScalingLike | None) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if stretch is None:
        return freqs
    if stretch.kind == "linear":
        return freqs / stretch.factor
    assert stretch.kind == "llama3", stretch.kind
    waves = 2 * math.pi / freqs
    low, high = stretch.low_freq_factor, stretch.high_freq_factor
    # 0: slow, divided by the factor; 1: fast, untouched; between them a blend.
    keep = ((stretch.original_max_len / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * freqs / stretch.factor + keep * freqs
