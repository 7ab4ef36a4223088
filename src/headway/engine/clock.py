"""Time, passed in wherever it is needed: the core only ever sees `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary start; never goes back."""


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only by `advance`: simulations and tests give the same bytes every time."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
