"""Preempted requests, in the order in which they come back: a heap, with tombstones for those that are gone."""

from __future__ import annotations

import heapq

from headway.core.request import Request


class ResumeQueue:
    """A request is in it at most once; smaller orders come first, equal ones as they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []
        self._turn: dict[int, int] = {}  # id -> its entry's number; an entry with another number is a tombstone
        self._next_turn = 0

    def __len__(self) -> int:
        return len(self._turn)

    def __contains__(self, id: int) -> bool:
        return id in self._turn

    def push(self, req: Request, *order: float) -> None:
        self._next_turn += 1
        self._turn[req.id] = self._next_turn
        heapq.heappush(self._heap, (order, self._next_turn, req))

    def peek(self) -> Request | None:
        while self._heap:
            _, turn, req = self._heap[0]
            if self._turn.get(req.id) == turn:
                return req
            heapq.heappop(self._heap)
        return None

    def remove(self, id: int) -> bool:
        """False if it was not here."""
        return self._turn.pop(id, None) is not None

    def requests(self) -> list[Request]:
        """All of them, in no order; for inspection, O(n)."""
        return [req for _, turn, req in self._heap if self._turn.get(req.id) == turn]
