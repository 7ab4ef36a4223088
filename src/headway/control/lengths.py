"""How long answers get, without learning anything about prompts: averages by tenant and route.

The mean of the logarithm is kept, and the mean distance from it, each forgetting slowly. An answer that was cut off at
its limit, or abandoned, was at least that long: it only ever raises an average.

Before the first answer the ceiling is a constant: what a request declares says little about what it will write, and
memory kept for it would stay unused. The median, which only orders requests, is what they declare until then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SPEED = 0.05  # weight of the newest answer
MOST = 4096  # averages that are kept; the oldest go first
PRIOR = 512  # output tokens: the ceiling before the first answer
Q75 = 0.85  # mean distances from the median to the third quartile, as in a normal distribution


class Expected(NamedTuple):
    """Output tokens: the median, and what most do not exceed: three in four here, nine in ten by a ranker."""

    median: float
    ceiling: float


class _Average:
    __slots__ = ("ceiling", "count", "mean", "median", "spread")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.spread = 0.7  # a factor of two, until something is known
        self.median, self.ceiling = math.inf, float(PRIOR)  # tokens

    def add(self, value: float, is_cut: bool) -> None:
        if is_cut and self.count and value <= self.mean:
            return
        self.count += 1
        step = max(SPEED, 1.0 / self.count)
        off = value - self.mean
        self.mean += step * off
        if self.count > 1:
            self.spread += step * (abs(off) - self.spread)
        self.median, self.ceiling = math.exp(self.mean), math.exp(self.mean + Q75 * self.spread)


class Lengths:
    """Answers by tenant and route; a pair that is new has the average of all."""

    def __init__(self) -> None:
        self._all = _Average()
        self._of: dict[tuple[str, str], _Average] = {}

    def learn(self, tenant: str, route: str, num_output: int, is_cut: bool) -> None:
        """An answer has ended; `is_cut` says that it would have been longer."""
        if num_output < 1:
            return
        value = math.log(num_output)
        self._all.add(value, is_cut)
        key = (tenant, route)
        average = self._of.pop(key, None) or _Average()
        self._of[key] = average
        average.add(value, is_cut)
        if len(self._of) > MOST:
            del self._of[next(iter(self._of))]

    def expect(self, tenant: str, route: str, max_tokens: int) -> Expected:
        """The expected length; at most `max_tokens`."""
        average = self._of.get((tenant, route), self._all)
        if average.count < 5:
            average = self._all
        return Expected(min(float(max_tokens), average.median), min(float(max_tokens), average.ceiling))
