"""The waiting line: a heap on a key that never changes, a lane for the preempted, tombstones for the gone.

Every operation is O(log n) at worst and none looks at the whole line, so a step costs the same with a hundred
waiting as with a hundred thousand.
"""

from __future__ import annotations

import heapq
from collections import deque

from headway.core.policy import Key
from headway.core.request import Request


class RankQueue:
    """A request is in the line at most once; the preempted come first, in the order they were preempted."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, int, Request]] = []
        self._resume: deque[Request] = deque()
        self._ticket: dict[int, int] = {}  # id -> the ticket of its one live entry; older entries are tombstones
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, id: int) -> bool:
        return id in self._ticket

    def push(self, req: Request, key: Key) -> None:
        """Take a place by key; equal keys by id."""
        heapq.heappush(self._heap, (key, req.id, self._new_ticket(req), req))

    def resume(self, req: Request) -> None:
        """Take a place before everybody who never ran."""
        self._new_ticket(req)
        self._resume.append(req)

    def peek(self) -> Request | None:
        """Whoever is next, or nobody."""
        while self._resume:
            req = self._resume[0]
            if req.id in self._ticket:
                return req
            self._resume.popleft()
        heap = self._heap
        while heap:
            _, id, ticket, req = heap[0]
            if self._ticket.get(id) == ticket:
                return req
            heapq.heappop(heap)
        return None

    def pop(self) -> Request | None:
        """Take out whoever is next."""
        req = self.peek()
        if req is None:
            return None
        del self._ticket[req.id]
        if self._resume:
            self._resume.popleft()
        else:
            heapq.heappop(self._heap)
        return req

    def remove(self, id: int) -> bool:
        """Leave the line; the entry stays as a tombstone until it surfaces or outnumbers the living."""
        if self._ticket.pop(id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._ticket) + 64:
            self._heap = [entry for entry in self._heap if self._ticket.get(entry[1]) == entry[2]]
            heapq.heapify(self._heap)
        return True

    def requests(self) -> list[Request]:
        """Everybody in the line, in no order; for inspection, O(n)."""
        living = [req for req in self._resume if req.id in self._ticket]
        return living + [entry[3] for entry in self._heap if self._ticket.get(entry[1]) == entry[2]]

    def _new_ticket(self, req: Request) -> int:
        assert req.id not in self._ticket, f"request {req.id} is in the line already"
        self._next_ticket += 1
        self._ticket[req.id] = self._next_ticket
        return self._next_ticket
