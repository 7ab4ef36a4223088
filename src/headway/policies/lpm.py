"""Longest cached prefix first, so that what is in the cache is used before it is evicted, with a deficit per tenant.

A request is ordered by how much of its prompt was cached when it was placed. When a block is published, requests that
need it next are placed anew, a bounded number per step; the head is checked again, since blocks are evicted too.

A tenant without deficit is skipped until all waiting tenants have used up theirs; each then gets a new quantum. That is
one sum for all, `_given`, and those that wait for it are in a heap, so a round visits few of them. Of tenants without
waiting requests those that had some last are known, as their debts are.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from headway.core.policy import Policy
from headway.core.queue import OrderedQueue
from headway.core.request import Account, Request
from headway.policies._shares import MOST_DEBTS

MOST_LOOKS = 32  # at requests, or at tenants, in one peek

_Entry = tuple[int, float, int, int, Request]  # cached tokens (negative), arrival, id, ticket


@dataclass(slots=True, eq=False)
class _Tenant:
    credit: float  # its deficit less what all were given
    is_parked: bool = False  # has its entry among those that wait for a new quantum
    heap: list[_Entry] = field(default_factory=list)
    count: int = 0


class PrefixQueue:
    """An entry whose ticket is not its request's newest is a tombstone."""

    def __init__(self, num_cached: Callable[[Request], int], quantum: float, share_every: int) -> None:
        self._num_cached = num_cached
        self._quantum = quantum
        self._share_every = share_every
        self._tenants: dict[str, _Tenant] = {}
        self._able: dict[str, None] = {}  # tenants with a waiting request and some deficit left, but for some parked
        self._parked: list[tuple[float, int, str, _Tenant]] = []  # the others that wait, by former credit
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()  # without waiting requests, longest so first
        self._given = 0.0
        self._ticket: dict[int, int] = {}
        self._request: dict[int, Request] = {}
        self._by_age: list[tuple[float, int, Request]] = []
        self._next_ticket = 0
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def push(self, req: Request) -> None:
        assert req.id not in self._ticket, f"request {req.id} is in the queue already"
        tenant = self._tenants.get(req.tenant)
        if tenant is None:
            tenant = self._tenants[req.tenant] = _Tenant(self._quantum - self._given)
        if not tenant.count:
            self._idle.pop(req.tenant, None)
            tenant.credit = min(tenant.credit, self._quantum - self._given)  # idle rounds earn no more than one
            if tenant.credit + self._given > 0:
                self._able[req.tenant] = None
            else:
                self._park(req.tenant, tenant)
        tenant.count += 1
        self._request[req.id] = req
        heapq.heappush(self._by_age, (req.arrival, req.id, req))
        self._place(req, tenant)

    def _place(self, req: Request, tenant: _Tenant) -> None:
        """Enter it by its cached tokens now; an earlier entry becomes a tombstone."""
        cached = self._num_cached(req)
        self._next_ticket += 1
        self._ticket[req.id] = self._next_ticket
        heapq.heappush(tenant.heap, (-cached, req.arrival, req.id, self._next_ticket, req))

    def update(self, req: Request) -> None:
        self._place(req, self._tenants[req.tenant])

    def peek(self, now: float) -> Request | None:
        if not self._ticket:
            return None
        if self.forbids_backfill(now):
            return self._oldest()
        if not self._unpark() and not self._able:
            self._refill()
        if not self._able:
            return self._oldest()
        for _ in range(MOST_LOOKS):
            tops = [top for name in _some(self._able) if (top := self._top(self._tenants[name])) is not None]
            if not tops:
                break
            best = min(tops)
            if self._num_cached(best[4]) >= -best[0]:
                return best[4]
            self._place(best[4], self._tenants[best[4].tenant])  # blocks of its prefix were evicted
        return self._oldest()

    def first(self, count: int, now: float) -> list[Request]:
        """Of tenants with deficit left, in the order of their last placing."""
        tenants = [self._tenants[name] for name in islice(self._able, MOST_LOOKS)]
        tops = [top for tenant in tenants if (top := self._top(tenant)) is not None]
        heapq.heapify(tops)
        found: list[_Entry] = []
        while tops and len(found) < count:
            found.append(heapq.heappop(tops))
            tenant = self._tenants[found[-1][4].tenant]
            heapq.heappop(tenant.heap)
            if (top := self._top(tenant)) is not None:
                heapq.heappush(tops, top)
        for entry in found:  # they stay where they were
            heapq.heappush(self._tenants[entry[4].tenant].heap, entry)
        return [entry[4] for entry in found]

    def forbids_backfill(self, now: float) -> bool:
        k = self._share_every
        return k > 0 and self._num_admitted % k == k - 1

    def _top(self, tenant: _Tenant) -> _Entry | None:
        while tenant.heap and self._ticket.get(tenant.heap[0][2]) != tenant.heap[0][3]:
            heapq.heappop(tenant.heap)
        return tenant.heap[0] if tenant.heap else None

    def _oldest(self) -> Request | None:
        while self._by_age:
            req = self._by_age[0][2]
            if self._request.get(req.id) is req:
                return req
            heapq.heappop(self._by_age)
        return None

    def _park(self, name: str, tenant: _Tenant) -> None:
        """It waits without deficit."""
        if not tenant.is_parked:
            tenant.is_parked = True
            self._next_ticket += 1
            heapq.heappush(self._parked, (-tenant.credit, self._next_ticket, name, tenant))

    def _unpark(self) -> bool:
        """Make some of the tenants able that have deficit; True if there were any."""
        num_before = len(self._able)
        for _ in range(MOST_LOOKS):
            nearest = self._nearest()
            if nearest is None or nearest.credit + self._given <= 0:
                break
            nearest.is_parked = False
            self._able[heapq.heappop(self._parked)[2]] = None
        return len(self._able) > num_before

    def _nearest(self) -> _Tenant | None:
        """The parked tenant with the most credit, the first in the heap; those that wait no more are dropped."""
        while self._parked:
            credit, ticket, name, tenant = self._parked[0]
            if not tenant.count:
                tenant.is_parked = False
                heapq.heappop(self._parked)
            elif tenant.credit < -credit:
                heapq.heapreplace(self._parked, (-tenant.credit, ticket, name, tenant))
            else:
                return tenant
        return None

    def _refill(self) -> None:
        """No waiting tenant has deficit left: add as many quanta as the nearest of them needs."""
        nearest = self._nearest()
        if nearest is not None:
            self._given += self._quantum * (1 + math.floor(-(nearest.credit + self._given) / self._quantum))
            self._unpark()

    def admit(self, req: Request) -> None:
        self._num_admitted += 1
        self.remove(req.id)

    def remove(self, id: int) -> bool:
        if self._ticket.pop(id, None) is None:
            return False
        req = self._request.pop(id)
        tenant = self._tenants[req.tenant]
        tenant.count -= 1
        if not tenant.count:
            self._able.pop(req.tenant, None)
            tenant.heap.clear()
            self._rest(req.tenant, tenant)
        elif len(tenant.heap) > 4 * tenant.count + 64:
            tenant.heap = [entry for entry in tenant.heap if self._ticket.get(entry[2]) == entry[3]]
            heapq.heapify(tenant.heap)
        if len(self._by_age) > 4 * len(self._ticket) + 64:
            self._by_age = [entry for entry in self._by_age if self._request.get(entry[1]) is entry[2]]
            heapq.heapify(self._by_age)
        return True

    def _rest(self, name: str, tenant: _Tenant) -> None:
        """It has no waiting request any more; of those that have none the first are forgotten."""
        for first, idle in list(islice(self._idle.items(), 2)):
            if len(self._idle) < MOST_DEBTS and idle.credit + self._given < self._quantum:
                break
            del self._idle[first], self._tenants[first]
        self._idle[name] = tenant
        if len(self._parked) > 4 * len(self._ticket) + 64:
            self._parked = [entry for entry in self._parked if entry[3].count]
            heapq.heapify(self._parked)

    def charge(self, account: Account, amount: float) -> None:
        tenant = self._tenants.get(account.tenant)
        if tenant is not None:
            tenant.credit -= amount
            if tenant.count and tenant.credit + self._given <= 0:
                self._able.pop(account.tenant, None)
                self._park(account.tenant, tenant)

    def requests(self) -> list[Request]:
        return list(self._request.values())


def _some(names: dict[str, None]) -> list[str]:
    """Up to `MOST_LOOKS` of them; the first goes to the end, so that all are seen in time."""
    first = next(iter(names))
    del names[first]
    names[first] = None
    return [name for name, _ in zip(names, range(MOST_LOOKS), strict=False)]


class LongestPrefixMatch(Policy):
    """`quantum` is the service of a tenant per round, in tokens: a computed prompt token 1, a generated token 2."""

    is_global_order: ClassVar[bool] = True
    has_shares: ClassVar[bool] = True
    keys_by_cache = True
    share_every = 10
    backfill_depth: ClassVar[int] = 16

    def __init__(self, *, quantum: float = 8192.0, share_every: int | None = None) -> None:
        super().__init__(share_every=share_every)
        self.quantum = quantum
        self._queue: PrefixQueue | None = None

    def queue(self) -> OrderedQueue:
        self._queue = PrefixQueue(self.context.num_cached, self.quantum, self.share_every)
        return self._queue

    def on_admit(self, req: Request) -> None:
        assert self._queue is not None
        if not req.num_preempted:
            self._queue.charge(req.account, req.num_prompt - req.num_cached)

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        assert self._queue is not None
        self._queue.charge(account, 2.0 * num_out)


PLUGIN = LongestPrefixMatch
