"""Waiting requests by key: a heap, a second one by age, tombstones for removed entries.

Every operation is O(log n) at worst and none visits the whole queue, so a step costs the same with a hundred
waiting as with a hundred thousand.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from headway.core.request import Account, Request

Key = tuple[float, ...]
Entry = TypeVar("Entry", bound=tuple[Any, ...])
REPAID = 0.75


class OrderedQueue(Protocol):
    """A queue that a policy may replace. A request is in it at most once; its head changes only with calls and time."""

    def __len__(self) -> int: ...

    def push(self, req: Request) -> None:
        """Enter the queue, for the first time or again."""

    def update(self, req: Request) -> None:
        """The key of a request in the queue has changed; called only with `Policy.keys_by_cache`."""
        return

    def peek(self, now: float) -> Request | None:
        """The head; None if the queue is empty."""

    def first(self, count: int, now: float) -> list[Request]:
        """The first `count` requests in order, or fewer; called only where `Policy.backfill_depth` is above 1."""
        return []

    def forbids_backfill(self, now: float) -> bool:
        """True if the head must not be passed over when it does not fit: it is the oldest request's turn."""

    def admit(self, req: Request) -> None:
        """It is admitted and leaves the queue."""

    def remove(self, id: int) -> bool:
        """It leaves the queue for any other reason; False if it was not here."""

    def charge(self, account: Account, amount: float) -> None:
        """An account got so much service."""
        return

    def requests(self) -> list[Request]:
        """All requests, in no order; for inspection, O(n)."""


def first_live(heap: list[Entry], count: int, is_live: Callable[[Entry], bool]) -> list[Entry]:
    """The smallest `count` live entries, in order; they stay. Tombstones in front of them are dropped for good."""
    found: list[Entry] = []
    while heap and len(found) < count:
        entry = heapq.heappop(heap)
        if is_live(entry):
            found.append(entry)
    for entry in found:
        heapq.heappush(heap, entry)
    return found


class RankQueue(OrderedQueue):
    """Smallest key first, equal keys by id; with `share_every` k, each k-th admission takes the oldest instead.

    The oldest are often the most expensive. Before the next turn of the oldest, the other admissions must cost a third
    more than its last turn did: else a tenth of all admissions could be most of the work, as in arrival order.
    With `boost_after` a request that has waited that long goes first, oldest first. Once overload lasts longer than
    that, all requests have, and the order is arrival; a share for the oldest has no such cliff.
    """

    def __init__(
        self,
        key: Callable[[Request], Key],
        share_every: int = 0,
        boost_after: float = math.inf,
        cost: Callable[[Request], float] = lambda _: 1.0,
        has_ages: bool = False,
    ) -> None:
        self._has_oldest = has_ages  # `oldest` is asked
        self._set(share_every, boost_after)
        self._key = key
        self._cost = cost
        # The key's numbers, id, ticket, request: flat, so that a comparison in a deep heap looks at one object less.
        self._heap: list[tuple[Any, ...]] = []
        self._by_age: list[tuple[Any, ...]] = []  # likewise by arrival; kept only where the oldest have a share
        self._ticket: dict[int, int] = {}  # id -> the ticket of its one live entry; older entries are tombstones
        self._next_ticket = 0

    def _set(self, share_every: int, boost_after: float) -> None:
        self.share_every, self.boost_after = share_every, boost_after
        self._has_ages = self._has_oldest or share_every > 0 or boost_after < math.inf
        self._num_since = 0  # admissions since the oldest had its turn
        self._debt = 0.0  # what that turn cost, less `REPAID` of what the others cost since

    def tune(self, share_every: int, boost_after: float) -> None:
        """Change the rules and re-key all requests: O(n), not for every step."""
        self._set(share_every, boost_after)
        waiting, self._heap, self._by_age = self.requests(), [], []
        for req in waiting:
            del self._ticket[req.id]
            self.push(req)

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, id: int) -> bool:
        return id in self._ticket

    def push(self, req: Request, key: Key | None = None) -> None:
        """Take a place, or take it again; the caller may know the key."""
        assert req.id not in self._ticket, f"request {req.id} is in the queue already"
        if not self._ticket:
            self._debt = 0.0  # the unit of costs may change while none waits
        self._place(req, key or self._key(req))

    def _place(self, req: Request, key: Key) -> None:
        self._next_ticket += 1
        self._ticket[req.id] = self._next_ticket
        heapq.heappush(self._heap, (*key, req.id, self._next_ticket, req))
        if self._has_ages:
            heapq.heappush(self._by_age, (req.arrival, req.id, self._next_ticket, req))

    def update(self, req: Request) -> None:
        self._place(req, self._key(req))
        self._bury()

    def peek(self, now: float) -> Request | None:
        if not self._ticket:
            return None
        return self._top(self._by_age if self._has_ages and self.forbids_backfill(now) else self._heap)

    def oldest(self) -> Request | None:
        return self._top(self._by_age) if self._ticket else None

    def first(self, count: int, now: float) -> list[Request]:
        return [entry[-1] for entry in first_live(self._heap, count, self._is_live)]

    def forbids_backfill(self, now: float) -> bool:
        if self.share_every and self._is_turn():
            return True
        if self.boost_after == math.inf or not self._ticket:
            return False
        return now - self._top(self._by_age).arrival >= self.boost_after

    def _is_turn(self) -> bool:
        """True if the oldest is next: enough others were admitted, and they cost more than its last turn."""
        return self._num_since >= self.share_every - 1 and self._debt <= 0.0

    def _top(self, heap: list[tuple[Any, ...]]) -> Request:
        ticket_of, entry = self._ticket.get, heap[0]
        while ticket_of(entry[-3]) != entry[-2]:
            heapq.heappop(heap)
            entry = heap[0]
        req: Request = entry[-1]
        return req

    def _is_live(self, entry: tuple[Any, ...]) -> bool:
        return bool(self._ticket.get(entry[-3]) == entry[-2])

    def admit(self, req: Request) -> None:
        del self._ticket[req.id]
        if self.share_every and self._is_turn():
            self._num_since, self._debt = 0, self._cost(req) if self.share_every > 1 else 0.0
        elif self.share_every:
            self._num_since += 1
            if self._debt > 0.0:  # once it is repaid, costs do not matter until the next turn
                self._debt -= self._cost(req) * max(REPAID, 1 / (self.share_every - 1))
        self._bury()

    def remove(self, id: int) -> bool:
        if self._ticket.pop(id, None) is None:
            return False
        self._bury()
        return True

    def requests(self) -> list[Request]:
        return [entry[-1] for entry in self._heap if self._is_live(entry)]

    def _bury(self) -> None:
        """Tombstones stay until they surface or are three times as many as live entries."""
        most, ticket_of = 4 * len(self._ticket) + 64, self._ticket.get
        for heap in (self._heap, self._by_age):
            if len(heap) > most:
                heap[:] = [entry for entry in heap if ticket_of(entry[-3]) == entry[-2]]
                heapq.heapify(heap)
