"""How many draft tokens each row gets: as many as make the expected tokens per second of the step largest.

The guesses of all rows are taken from the likeliest on. A guess counts if all before it are right, so its chance is the
product of theirs, and no row's second guess comes before its first.
"""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_GAIN = 1.03  # below, what a draft costs outside the step is more than it gains
SUREST = 0.98  # no guess is likelier


def lengths(
    times: Sequence[float], num_rows: int, chances: Sequence[Sequence[float]], round_s: float = 0.0
) -> list[int]:
    """How many guesses of each row to verify; `times` as `VerifyTimes.table` gives them, of all `num_rows` rows.

    Guesses of a draft model take time before the step, `round_s` for one of each row.
    """
    chosen = [0] * len(chances)
    most = len(times) - 1
    if num_rows > most or times[num_rows] <= 0.0:
        return chosen
    order = sorted((-chance, row) for row, each in enumerate(chances) for chance in each)
    best, num_best, expected = _LEAST_GAIN * num_rows / times[num_rows], 0, float(num_rows)
    depth, rounds = [0] * len(chances), 0
    for count, (chance, row) in enumerate(order[: most - num_rows], 1):
        expected -= chance
        depth[row] += 1
        rounds = max(rounds, depth[row])
        rate = expected / (times[num_rows + count] + rounds * round_s)
        if rate > best:
            best, num_best = rate, count
    for _, row in order[:num_best]:
        chosen[row] += 1
    return chosen


def can_gain(times: Sequence[float], num_rows: int, most: int, round_s: float = 0.0) -> bool:
    """Whether guesses that are nearly sure would gain anything beside so many rows."""
    if not 0 < num_rows < len(times):
        return False
    least = _LEAST_GAIN * num_rows / times[num_rows] if times[num_rows] > 0.0 else float("inf")
    for count in range(1, min(most * num_rows, len(times) - 1 - num_rows) + 1):
        if num_rows + SUREST * count > least * (times[num_rows + count] + -(-count // num_rows) * round_s):
            return True
    return False
