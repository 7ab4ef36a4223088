"""The work of a step as cost models count it, and the interface of a cost model."""

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
    verify: int = 0  # draft tokens; the rows that verify them are among `decode`

    def features(self) -> tuple[float, ...]:
        """One, whether it carries a chunk, then the fields."""
        return (1.0, 1.0 if self.chunks else 0.0, *map(float, self))


def pairs_of(start: int, count: int) -> int:
    """Twice the key-query pairs of a chunk that computes `count` tokens after `start` present ones."""
    return (2 * start + count) * count


class Costs:
    """Predicted seconds; this one predicts 0. A cost model overrides every method."""

    is_ready: bool = False
    mean_decode: float = 1.0  # rows that decode together

    def observe(self, work: Work, seconds: float) -> None:
        """A step with this work took so long."""

    def step(self, work: Work) -> float:
        """A step with this work."""
        return 0.0

    def prefill(self, count: int, start: int = 0) -> float:
        """What `count` prompt tokens add to steps after `start` present ones."""
        return 0.0

    def decode(self, num_prompt: int, num_output: float, num_rows: float | None = None) -> float:
        """The engine's time for so many output tokens, among so many rows; among as many as usual if None."""
        return 0.0

    def copy(self, num_blocks: int) -> float:
        """What moving so many blocks adds to a step."""
        return 0.0
