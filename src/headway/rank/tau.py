"""Kendall's tau-b: how far two orders agree, from -1 (reversed) over 0 (independent) to 1."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def kendall_tau(xs: Sequence[float], ys: Sequence[float]) -> float:
    """O(n log n). 0 where either side is one tie or there is no pair.

    Knight's algorithm: with the points sorted by x, a pair is discordant exactly where sorting by y must swap it.
    """
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} and {len(ys)} values; tau compares pairs of them")
    points = sorted(zip(xs, ys, strict=True))
    total = _pairs(len(points))
    tied_x, tied_y, tied_both = (
        sum(_pairs(count) for count in Counter(values).values())
        for values in ((x for x, _ in points), (y for _, y in points), iter(points))
    )
    norm = math.sqrt(total - tied_x) * math.sqrt(total - tied_y)
    if not norm:
        return 0.0
    swaps, _ = _sort([y for _, y in points])
    return (total - tied_x - tied_y + tied_both - 2 * swaps) / norm


def _pairs(count: int) -> int:
    return count * (count - 1) // 2


def _sort(values: list[float]) -> tuple[int, list[float]]:
    """The number of inverted pairs, and the values sorted: a merge sort that counts."""
    if len(values) < 2:
        return 0, values
    half = len(values) // 2
    swaps_left, left = _sort(values[:half])
    swaps_right, right = _sort(values[half:])
    swaps, merged, i = swaps_left + swaps_right, [], 0
    for value in right:
        while i < half and left[i] <= value:
            merged.append(left[i])
            i += 1
        swaps += half - i  # what is left over there is larger and came before it
        merged.append(value)
    return swaps, merged + left[i:]
