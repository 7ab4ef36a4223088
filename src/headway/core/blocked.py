"""Waiting requests that are blocked on a prefix: some running row computes the block they need next.

Such a request waits for that block instead of computing it again. It blocks on the *last* block it shares with the
row, so it wakes once. A row that publishes nothing for `STALLED_AFTER` steps is stalled: what waits for it wakes and
computes for itself.

    admit or queue a request      block ──▶ group of (last shared key) ──▶ wake: published, given up or stalled
                                                                             │
    waiting queue  ◀── take_ready: at most MOST_MOVES per step, in turn ─────┘

A common system prompt can block a hundred thousand requests, so no call here visits all members of a group.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from headway.core.request import Request
from headway.kv.prefix import num_shared

STALLED_AFTER = 4  # steps
MOST_MOVES = 64  # requests that leave or enter the waiting queue in one step; each takes 5 to 10 us


@dataclass(slots=True, eq=False)
class _PrefixGroup:
    source: Request  # its row computes the prefix
    published: int  # blocks of the source that were published when it was last found to progress
    heap: list[tuple[int, float, int, Request]] = field(default_factory=list)  # by rank, then by arrival
    num_live: int = 0  # other entries of the heap are tombstones


class BlockedOnPrefix:
    """A blocked request is in exactly one group; a group is keyed by the block it waits for, or it is ready."""

    def __init__(self, rank: Callable[[Request], int]) -> None:
        self.step = 0
        self._rank = rank
        self._group_of: dict[int, _PrefixGroup] = {}
        self._by_key: dict[bytes, _PrefixGroup] = {}
        self.row_of: dict[bytes, int] = {}  # key of a block -> the row that is about to compute it
        self._checks: dict[
            int, list[tuple[bytes, _PrefixGroup]]
        ] = {}  # by the step in which the source must have progressed
        self._stalled: dict[int, tuple[int, int]] = {}  # row -> its request and how many blocks it had published
        self._ready: deque[_PrefixGroup] = deque()

    def __len__(self) -> int:
        return len(self._group_of)

    def expect(self, req: Request) -> None:
        """The request's row is about to compute its blocks; of several rows the last, since others may be stalled."""
        self.row_of.update(dict.fromkeys(req.keys[req.published :], req.row))

    def settle(self, key: bytes, row: int) -> None:
        """The row has published this block, or has given it up."""
        if self.row_of.get(key) == row:
            del self.row_of[key]
        self.wake(key)

    def block(self, req: Request, source: Request) -> bool:
        """Block a request on the blocks that `source` is computing; False if that row is stalled or less urgent."""
        if self._stalled.get(source.row) == (source.id, source.published) or self._rank(source) > self._rank(req):
            return False  # a less urgent row may be given hardly any tokens
        key = req.keys[num_shared(req.keys, source.keys) - 1]
        group = self._by_key.get(key)
        if group is None:
            group = self._by_key[key] = _PrefixGroup(source, source.published)
            self._checks.setdefault(self.step + STALLED_AFTER, []).append((key, group))
        heapq.heappush(group.heap, (self._rank(req), req.arrival, req.id, req))
        group.num_live += 1
        self._group_of[req.id] = group
        return True

    def wake(self, key: bytes) -> None:
        """What waits for this block waits no longer."""
        group = self._by_key.pop(key, None)
        if group is not None:
            self._ready.append(group)

    def begin_step(self, step: int) -> None:
        """Wake the groups whose source has published nothing for `STALLED_AFTER` steps."""
        self.step = step
        for key, group in self._checks.pop(step, ()):
            if self._by_key.get(key) is not group:
                continue  # it has woken since
            source = group.source
            if source.published > group.published:
                group.published = source.published
                self._checks.setdefault(step + STALLED_AFTER, []).append((key, group))
            else:
                self._stalled[source.row] = (source.id, source.published)
                self.wake(key)

    def take_ready(self) -> list[Request]:
        """Requests that have woken, from each group in turn; the rest stays for the next step."""
        taken: list[Request] = []
        while self._ready and len(taken) < MOST_MOVES:
            group = self._ready.popleft()
            while group.heap:
                req = heapq.heappop(group.heap)[-1]
                if self._group_of.get(req.id) is group:
                    del self._group_of[req.id]
                    taken.append(req)
                    self._ready.append(group)
                    break
        return taken

    def remove(self, id: int) -> bool:
        """A blocked request ends; False if it is not here."""
        group = self._group_of.pop(id, None)
        if group is None:
            return False
        group.num_live -= 1
        if len(group.heap) > 2 * group.num_live + 64:
            group.heap = [entry for entry in group.heap if self._group_of.get(entry[2]) is group]
            heapq.heapify(group.heap)
        return True

    def requests(self) -> list[Request]:
        """All members, in no order; for inspection, O(n)."""
        groups = {id(group): group for group in self._group_of.values()}
        entries = ((entry, group) for group in groups.values() for entry in group.heap)
        return [entry[-1] for entry, group in entries if self._group_of.get(entry[2]) is group]


class NeededBlocks:
    """Queued requests by the block they need next, for policies whose keys depend on the cache.

    When the block is published their keys are stale; `take_stale` hands them out a bounded number per step.
    """

    def __init__(self) -> None:
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, dict[int, Request]] = {}
        self._stale: deque[tuple[bytes, dict[int, Request]]] = deque()

    def note(self, req: Request, key: bytes) -> None:
        self._key_of[req.id] = key
        self._by_key.setdefault(key, {})[req.id] = req

    def forget(self, id: int) -> None:
        """The request has left the queue."""
        key = self._key_of.pop(id, b"")
        members = self._by_key.get(key)
        if members is not None:
            members.pop(id, None)  # it may be stale already, while others need the block again
            if not members:
                del self._by_key[key]

    def published(self, key: bytes) -> None:
        """The keys of the requests that need this block are stale."""
        members = self._by_key.pop(key, None)
        if members is not None:
            self._stale.append((key, members))

    def take_stale(self) -> list[Request]:
        """Some of those that are still queued, the first noted first."""
        taken: list[Request] = []
        while self._stale and len(taken) < MOST_MOVES:
            key, members = self._stale[0]
            for req in list(islice(members.values(), MOST_MOVES - len(taken))):
                del members[req.id]
                if self._key_of.get(req.id) == key:
                    del self._key_of[req.id]
                    taken.append(req)
            if not members:
                self._stale.popleft()
        return taken
