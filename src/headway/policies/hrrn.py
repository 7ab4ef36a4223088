"""Highest response ratio next: the longer one waits for what it costs, the sooner its turn.

The ratio changes with time, so there is no key. Requests stand in first-come queues by cost, two to a doubling; among
those at the heads the best ratio is within a factor of the square root of two of the best there is.

Nobody waits for ever, but who costs ten times as much waits ten times as long. Where that is too long, `share_every`
gives every so many-eth seat to the oldest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from headway.core.policy import Policy
from headway.core.queue import WaitQueue
from headway.core.request import Account, Request


class RatioQueue:
    """Queues by cost; `peek` looks at the head of each, and there are about forty."""

    def __init__(self, cost: Callable[[Request], float], share_every: int = 0) -> None:
        self._cost = cost
        self._share_every = share_every
        self._num_admitted = 0
        self._buckets: dict[int, OrderedDict[int, tuple[Request, float]]] = {}
        self._bucket_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._bucket_of)

    def push(self, req: Request) -> None:
        assert req.id not in self._bucket_of, f"request {req.id} is in the queue already"
        cost = max(self._cost(req), 1e-9)
        number = math.floor(2 * math.log2(cost))
        bucket = self._buckets.setdefault(number, OrderedDict())
        last = next(reversed(bucket.values()), None)
        bucket[req.id] = (req, cost)
        if last is not None and last[0].arrival > req.arrival:  # it comes back: the oldest stay in front
            bucket.move_to_end(req.id, last=False)
        self._bucket_of[req.id] = number

    def peek(self, now: float) -> Request | None:
        if self.insists(now):
            heads = (next(iter(bucket.values()))[0] for bucket in self._buckets.values())
            return min(heads, key=lambda req: (req.arrival, req.id), default=None)
        best, highest = None, -math.inf
        for bucket in self._buckets.values():
            req, cost = next(iter(bucket.values()))
            ratio = (now - req.arrival) / cost
            if ratio > highest:
                best, highest = req, ratio
        return best

    def first(self, count: int, now: float) -> list[Request]:
        """The head of each queue: whoever is behind one of them costs about as much."""
        heads = [next(iter(bucket.values())) for bucket in self._buckets.values()]
        heads.sort(key=lambda head: (head[0].arrival - now) / head[1])
        return [req for req, _ in heads[:count]]

    def insists(self, now: float) -> bool:
        k = self._share_every
        return k > 0 and self._num_admitted % k == k - 1

    def admit(self, req: Request) -> None:
        self._num_admitted += 1
        self.remove(req.id)

    def remove(self, id: int) -> bool:
        number = self._bucket_of.pop(id, None)
        if number is None:
            return False
        bucket = self._buckets[number]
        del bucket[id]
        if not bucket:
            del self._buckets[number]
        return True

    def charge(self, account: Account, amount: float) -> None:
        pass

    def requests(self) -> list[Request]:
        return [req for bucket in self._buckets.values() for req, _ in bucket.values()]


class HighestRatioNext(Policy):
    """A ratio grows without bound, but a dear request waits in proportion to its cost: the oldest have a share too."""

    share_every = 10

    def queue(self) -> WaitQueue:
        return RatioQueue(self.tools.request_cost, self.share_every)


PLUGIN = HighestRatioNext
