"""Interleaved runs: on a shared machine only these compare, and the median of several rounds counts."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Rounds(Generic[Found]):
    """What each of several setups gave, round by round."""

    def __init__(self, names: Iterable[str]) -> None:
        self._found: dict[str, list[Found]] = {name: [] for name in names}

    def turns(self, rounds: int) -> Iterator[str]:
        """The name of the setup that runs next, also printed to standard error."""
        for number in range(1, rounds + 1):
            for name in self._found:
                sys.stderr.write(f"  round {number} of {rounds}, {name}\n")
                sys.stderr.flush()
                yield name

    def add(self, name: str, found: Found) -> None:
        sys.stderr.write(f"    {found}\n")
        self._found[name].append(found)

    def __getitem__(self, name: str) -> Sequence[Found]:
        return self._found[name]


def ratio(ones: Sequence[Found], others: Sequence[Found], of: Callable[[Found], float]) -> float:
    """The median over rounds of one over the other in the same round."""
    return statistics.median(of(one) / of(other) for one, other in zip(ones, others, strict=True))


def median(found: Sequence[Found], of: Callable[[Found], float]) -> float:
    return statistics.median(map(of, found))
