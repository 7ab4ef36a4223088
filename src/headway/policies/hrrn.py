"""Highest response ratio next: the largest ratio of waiting time to cost is admitted first.

The ratio changes with time, so there is no key. Requests wait in arrival order in buckets by cost, two per doubling;
the best ratio among the heads of the buckets is within a factor of sqrt(2) of the best of all.

No request starves, but one of ten times the cost waits ten times as long. `share_every` bounds that: every k-th
admission takes the oldest request.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headway.core.policy import Policy
from headway.core.queue import OrderedQueue, RankQueue
from headway.core.request import Request


class RatioQueue(OrderedQueue):
    """Queues by cost; `peek` looks at the head of each, and there are about forty."""

    def __init__(self, cost: Callable[[Request], float], share_every: int = 0) -> None:
        self._cost = cost
        self._share_every = share_every
        self._num_admitted = 0
        self._buckets: dict[int, RankQueue] = {}
        self._heads: dict[int, Request] = {}  # of the buckets
        self._bucket_of: dict[int, tuple[int, float]] = {}  # id -> its bucket and its cost

    def __len__(self) -> int:
        return len(self._bucket_of)

    def push(self, req: Request) -> None:
        assert req.id not in self._bucket_of, f"request {req.id} is in the queue already"
        cost = max(self._cost(req), 1e-9)
        number = math.floor(2 * math.log2(cost))
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = RankQueue(lambda req: (req.arrival,))
        bucket.push(req)
        self._bucket_of[req.id] = (number, cost)
        self._look(number, bucket)

    def update(self, req: Request) -> None:
        self.remove(req.id)
        self.push(req)

    def peek(self, now: float) -> Request | None:
        if self.forbids_backfill(now):
            return min(self._heads.values(), key=lambda req: (req.arrival, req.id), default=None)
        best, most, bucket_of = None, -math.inf, self._bucket_of
        for head in self._heads.values():  # once per admission: `max` with a key takes twice as long
            ratio = (now - head.arrival) / bucket_of[head.id][1]
            if ratio > most:
                best, most = head, ratio
        return best

    def _look(self, number: int, bucket: RankQueue) -> None:
        """A bucket has changed: its head may have."""
        head = bucket.peek(0.0)
        if head is None:
            del self._buckets[number], self._heads[number]
        else:
            self._heads[number] = head

    def forbids_backfill(self, now: float) -> bool:
        k = self._share_every
        return k > 0 and self._num_admitted % k == k - 1

    def admit(self, req: Request) -> None:
        self._num_admitted += 1
        self.remove(req.id)

    def remove(self, id: int) -> bool:
        number, _ = self._bucket_of.pop(id, (0, 0.0))
        bucket = self._buckets.get(number)
        if bucket is None or not bucket.remove(id):
            return False
        self._look(number, bucket)
        return True

    def requests(self) -> list[Request]:
        return [req for bucket in self._buckets.values() for req in bucket.requests()]


class HighestRatioNext(Policy):
    """Requests wait in proportion to their cost; every tenth admission takes the oldest."""

    keys_by_cache = True
    share_every = 10

    def queue(self) -> OrderedQueue:
        return RatioQueue(self.context.request_cost, self.share_every)


PLUGIN = HighestRatioNext
