"""Batch barriers: the baselines that continuous batching is compared with.

naive       one request at a time
static      a full batch at once; the next batch when all requests of this one have ended
dynamic     the same, but a batch that is not full starts when its oldest request has waited `window` seconds
buckets     the oldest request and those of about its expected answer length
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from headway.core.policy import Policy
from headway.core.queue import OrderedQueue, RankQueue
from headway.core.request import Request


class BatchGate:
    """Admits a batch when none runs: once it is full, or its oldest request has waited `window` seconds."""

    is_barrier = True

    def __init__(self, size: int, window: float = 0.0) -> None:
        self.size = size
        self.window = window

    def num_slots(self, now: float, num_running: int, num_waiting: int, oldest: float) -> int:
        if num_running or (num_waiting < self.size and now - oldest < self.window):
            return 0
        return self.size


class NearQueue(OrderedQueue):
    """The oldest is next, then those nearest to it in expected length, the older of two equals first.

    A batch is admitted at one time: the oldest request at the first `peek` of that time gives the length. Lengths are
    whole tokens, and the sorted list holds each length once.
    """

    def __init__(self) -> None:
        self._ages = RankQueue(lambda req: (req.arrival,))
        self._lengths: list[int] = []
        self._groups: dict[int, RankQueue] = {}  # by length, each by age
        self._length_of: dict[int, int] = {}
        self._moment, self._wanted = math.nan, 0

    def __len__(self) -> int:
        return len(self._ages)

    def push(self, req: Request) -> None:
        self._ages.push(req)
        length = self._length_of[req.id] = round(req.likely_output)
        if length not in self._groups:
            self._groups[length] = RankQueue(lambda req: (req.arrival,))
            insort(self._lengths, length)
        self._groups[length].push(req)

    def peek(self, now: float) -> Request | None:
        oldest = self._ages.peek(now)
        if oldest is None:
            return None
        if now != self._moment:
            self._moment, self._wanted = now, self._length_of[oldest.id]
        at = bisect_left(self._lengths, self._wanted)
        nearest = min(self._lengths[max(0, at - 1) : at + 1], key=lambda length: abs(length - self._wanted))
        return self._groups[nearest].peek(now)

    def forbids_backfill(self, now: float) -> bool:
        return True  # a batch has an order and no second choice

    def admit(self, req: Request) -> None:
        self.remove(req.id)

    def remove(self, id: int) -> bool:
        if not self._ages.remove(id):
            return False
        length = self._length_of.pop(id)
        group = self._groups[length]
        group.remove(id)
        if not len(group):
            del self._groups[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return True

    def requests(self) -> list[Request]:
        return self._ages.requests()


class NearLengths(Policy):
    """The order of batches with buckets."""

    def queue(self) -> OrderedQueue:
        return NearQueue()
