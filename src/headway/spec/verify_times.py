"""What a step takes by the number of tokens that it computes for rows that decode or verify: what draft tokens cost.

The time of a step is no straight line in them: up to some number it hardly grows, since weights are read once for all
of them, and from then on every token costs. Each number has an average of its own; steps without draft tokens teach it
too. A number that was never seen lies on the line between its neighbours, or a little above the last one, so that it is
tried.
"""

from __future__ import annotations

MOST_TOKENS = 64
_SPEED = 0.1  # weight of the newest step
_MOST_OVER = 2.0  # times its average that a step counts for at most: one was held up by something else
_UNSEEN = 0.08  # of a step, for each token more than was ever seen
_FORGET_AFTER = 4096  # steps without one of this number


class VerifyTimes:
    """Seconds by number of tokens, never falling; 0 before the first step."""

    def __init__(self) -> None:
        self._average = [0.0] * (MOST_TOKENS + 1)
        self._count = [0] * (MOST_TOKENS + 1)
        self._seen = [0] * (MOST_TOKENS + 1)  # the last step that taught it
        self._num_steps = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if not 0 < num_tokens <= MOST_TOKENS:
            return
        self._num_steps += 1
        count, average = self._count[num_tokens], self._average[num_tokens]
        if self._num_steps - self._seen[num_tokens] > _FORGET_AFTER:
            count = 0
        off = (min(seconds, _MOST_OVER * average) if count else seconds) - average
        self._average[num_tokens] = average + max(_SPEED, 1.0 / (count + 1)) * off
        self._count[num_tokens], self._seen[num_tokens] = count + 1, self._num_steps

    def table(self) -> list[float]:
        """Expected seconds of 0 to MOST_TOKENS tokens."""
        found, least = [0.0] * (MOST_TOKENS + 1), float("inf")
        seen = [n for n in range(1, MOST_TOKENS + 1) if self._count[n]]
        for n in reversed(seen):  # one that costs no more with more tokens costs no more with fewer
            least = found[n] = min(least, self._average[n])
        if not seen:
            return found
        found[1 : seen[0]] = [found[seen[0]]] * (seen[0] - 1)
        for low, high in zip(seen, [*seen[1:], 0], strict=True):
            rise = (found[high] - found[low]) / (high - low) if high else _UNSEEN * found[low]
            for n in range(low + 1, high or MOST_TOKENS + 1):
                found[n] = found[low] + rise * (n - low)
        return found
