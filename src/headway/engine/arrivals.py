"""KV blocks that come from elsewhere, and where they come from: a tier of this engine, or another engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class ArrivedBlock(NamedTuple):
    """A block of a load, verified; without data: nothing more comes for this ticket."""

    ticket: int
    place: int  # among the keys of the load
    data: bytes | bytearray | memoryview | None


class BlockSource(Protocol):
    """Loads by key. Whatever fails, the load ends with an arrival without data or is forgotten when its lease ends."""

    wake: Callable[[], None]
    """Called, on any thread, when there are arrivals."""

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        """Begin to fetch these blocks, from the engine whose address is `at`; returns at once."""

    def close(self) -> None:
        """End its threads; idempotent."""

    def cancel(self, ticket: int) -> None:
        """What still comes for this ticket is not wanted."""

    def take(self, most: int) -> list[ArrivedBlock]:
        """Up to so many arrivals; their data is good until the next call."""

    @property
    def has_arrivals(self) -> bool:
        """True if `take` would return some."""
