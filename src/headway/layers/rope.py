"""Cosine and sine tables for rotary embeddings, from a base and an optional scaling of the frequencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_ROWS = 1024  # computed at once: as many as a cache holds
_VECTOR = 32  # powers that torch computes at once with AVX-512; what is left over it rounds correctly
_POWERS = {
    1e4: {(40, 96): -1, (222, 256): -1},
    1e5: {(56, 80): -1},
    1.3e5: {(2, 80): 1, (54, 256): -1, (178, 256): 1},
    1.5e5: {(12, 64): -1, (20, 64): 1, (24, 80): -1} | {(98, 256): -1, (202, 256): -1, (246, 256): -1},
    5e5: {(38, 96): -1},
    1e6: {(74, 128): -1},
    5e6: {(58, 96): 1, (38, 128): -1},
    1e7: {(22, 80): 1},
}
"""Powers theta ** (a / b) that torch, with which the models were made, gives as a neighbour of the nearest float32."""


class RopeScalingLike(Protocol):
    """`linear` divides every frequency by the factor; `llama3` only those with a wavelength beyond the old context;
    `divided` each by its own divisor."""

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
    @property
    def divisors(self) -> Sequence[float]: ...
    @property
    def amplitude(self) -> float: ...


class RopeTable(NamedTuple):
    cos: Floats  # [max_len, head_dim / 2]
    sin: Floats  # [max_len, head_dim / 2]


def rope_table(head_dim: int, max_len: int, theta: float, stretch: RopeScalingLike | None) -> RopeTable:
    """Angles in float32, as the models were trained with; their cosines rounded from float64, so that an entry does
    not depend on the length of the table."""
    freqs = _frequencies(head_dim, theta, stretch)
    shape = (max_len, len(freqs))
    cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for start in range(0, max_len, _ROWS):
        part = slice(start, min(start + _ROWS, max_len))
        angles = (np.arange(part.start, part.stop, dtype=np.float32)[:, None] * freqs).astype(np.float64)
        cos[part], sin[part] = np.cos(angles), np.sin(angles)
    if stretch is not None and stretch.amplitude != 1.0:
        cos *= np.float32(stretch.amplitude)
        sin *= np.float32(stretch.amplitude)
    return RopeTable(cos, sin)


def _frequencies(head_dim: int, theta: float, stretch: RopeScalingLike | None) -> Floats:
    one = np.float32(1)
    if stretch is not None and stretch.kind == "divided":
        divided: Floats = one / (np.array(stretch.divisors, np.float32) * _powers(head_dim, theta))
        return divided
    freqs = one / _powers(head_dim, theta)
    if stretch is None:
        return freqs
    if stretch.kind == "linear":
        return freqs / np.float32(stretch.factor)
    assert stretch.kind == "llama3", stretch.kind
    # A number divided by an array is, as in torch, the reciprocal multiplied: rounded twice.
    waves = np.float32(2 * math.pi) * (one / freqs)
    low, high = stretch.low_freq_factor, stretch.high_freq_factor
    # 0: slow, divided by the factor; 1: fast, untouched; between them a blend.
    turns = np.float32(stretch.original_max_len) * (one / waves)
    keep = ((turns - np.float32(low)) / np.float32(high - low)).clip(0.0, 1.0)
    blend: Floats = (one - keep) * freqs / np.float32(stretch.factor) + keep * freqs
    return blend


def _powers(head_dim: int, theta: float) -> Floats:
    """theta to the powers 0, 2 / head_dim, 4 / head_dim and so on: the nearest float32, but for what is in _POWERS."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)
    for (part, whole), steps in _POWERS.get(theta, {}).items():
        found = np.flatnonzero(exponents[: len(exponents) // _VECTOR * _VECTOR] == np.float32(part) / np.float32(whole))
        powers.view(np.int32)[found] += np.int32(steps)
    return powers
