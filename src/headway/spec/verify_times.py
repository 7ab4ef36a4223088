"""What a step takes by the number of tokens that it computes for rows that decode or verify: what draft tokens cost.

The time of a step is no straight line in them: up to some number it hardly grows, since weights are read once for all
of them, and from then on every token costs. Each number has an average of its own; steps without draft tokens teach it
too. A number that was never seen lies on the line between its neighbours, or a little above the last one, so that it is
tried.

Machines are faster and slower for seconds: what numbers that are well known take now, over their averages, is the pace,
and all averages are of pace 1. So two numbers compare though they were seen at different times.
"""

from __future__ import annotations

MOST_TOKENS = 64
_SPEED = 0.02  # weight of the newest step in the average of a number that is well known
_PACE_SPEED = 0.1  # and in the pace
_KNOWN = 8  # steps after which a number is well known
_MOST_OVER = 2.0  # times its average that a step counts for at most: one was held up by something else
_UNSEEN = 0.08  # of a step, for each token more than was ever seen
_FORGET_AFTER = 4096  # steps without one of this number
_HOLD = 16  # steps for which a table holds, once there were many


class VerifyTimes:
    """Seconds by number of tokens, never falling; 0 before the first step."""

    def __init__(self) -> None:
        self._average = [0.0] * (MOST_TOKENS + 1)  # at pace 1
        self._count = [0] * (MOST_TOKENS + 1)
        self._seen = [0] * (MOST_TOKENS + 1)  # the last step that taught it
        self._pace = 1.0
        self._num_steps = 0
        self._table: list[float] = []
        self._made_at = 0  # steps before the table

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if not 0 < num_tokens <= MOST_TOKENS:
            return
        self._num_steps += 1
        count, average = self._count[num_tokens], self._average[num_tokens]
        if self._is_forgotten(num_tokens):
            count = 0
        if count:
            seconds = min(seconds, _MOST_OVER * average * self._pace)
        if count >= _KNOWN and average > 0.0:
            self._pace += _PACE_SPEED * (seconds / average - self._pace)
        self._average[num_tokens] = average + max(_SPEED, 1.0 / (count + 1)) * (seconds / self._pace - average)
        self._count[num_tokens], self._seen[num_tokens] = count + 1, self._num_steps

    def _is_forgotten(self, num_tokens: int) -> bool:
        return self._num_steps - self._seen[num_tokens] > _FORGET_AFTER

    def table(self) -> list[float]:
        """Expected seconds of 0 to MOST_TOKENS tokens; making it takes 30 us, so that one holds for some steps."""
        since = self._num_steps - self._made_at
        if not self._table or since > min(_HOLD, self._made_at // _HOLD):
            self._table, self._made_at = self._made(), self._num_steps
        return self._table

    def _made(self) -> list[float]:
        found = [0.0] * (MOST_TOKENS + 1)
        seen = [n for n in range(1, MOST_TOKENS + 1) if self._count[n] and not self._is_forgotten(n)]
        if not seen:
            return found
        for n, average in zip(seen, self._never_falling(seen), strict=True):
            found[n] = average * self._pace
        found[1 : seen[0]] = [found[seen[0]]] * (seen[0] - 1)
        for low, high in zip(seen, [*seen[1:], 0], strict=True):
            rise = (found[high] - found[low]) / (high - low) if high else _UNSEEN * found[low]
            for n in range(low + 1, high or MOST_TOKENS + 1):
                found[n] = found[low] + rise * (n - low)
        return found

    def _never_falling(self, seen: list[int]) -> list[float]:
        """The averages of these numbers; those that fall share their mean, weighted by the steps that showed them."""
        pools: list[tuple[float, float, int]] = []  # mean, weight, numbers
        for n in seen:
            mean, weight, size = self._average[n], min(1.0 / _SPEED, self._count[n]), 1
            while pools and pools[-1][0] >= mean:
                before, its_weight, its_size = pools.pop()
                mean = (before * its_weight + mean * weight) / (its_weight + weight)
                weight, size = its_weight + weight, its_size + size
            pools.append((mean, weight, size))
        return [mean for mean, _, size in pools for _ in range(size)]
