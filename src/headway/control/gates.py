"""Batching as it was done before seats were given step by step: the honest baselines.

naive       one at a time
static      so many at once; the next batch when all of this one are done
dynamic     the same, but a batch that is not full leaves when its oldest has waited long enough
"""

from __future__ import annotations


class BatchGate:
    """Lets a batch in when nobody runs: when it is full, or its oldest has waited `window` seconds."""

    is_sealed = True

    def __init__(self, size: int, window: float = 0.0) -> None:
        self.size = size
        self.window = window

    def seats(self, now: float, num_running: int, num_waiting: int, oldest: float) -> int:
        if num_running or (num_waiting < self.size and now - oldest < self.window):
            return 0
        return self.size
