"""What a step carries, as whoever prices it counts it."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """What one step carries."""

    tokens: int = 0
    pairs: int = 0
    decode: int = 0
    context: int = 0
    chunks: int = 0
    copies: int = 0

    def features(self) -> tuple[float, ...]:
        """One, whether it carries a chunk, then the fields."""
        return (1.0, 1.0 if self.chunks else 0.0, *map(float, self))


def pairs_of(start: int, count: int) -> int:
    """Twice the pairs of a chunk that computes `count` cells after `start` present ones."""
    return (2 * start + count) * count
