"""Every request that waits: in the queue, among the preempted, blocked on a prefix, or behind a leader.

Preempted requests come back before those of their class that never ran. A request whose next block a running row is
computing blocks on it, see `blocked.py`. The later ones of n answers to a prompt stand behind the first and join when
its prompt is done. Where the policy's keys depend on the cache, a request is placed anew when the block it needs next
is published. No call but `requests` visits the whole queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

from headway.core.blocked import BlockedOnPrefix, NeededBlocks
from headway.core.ledger import KVLedger
from headway.core.policy import Key, Policy
from headway.core.queue import RankQueue
from headway.core.request import Request

MOST_SHED = 256  # in one step, so that none takes long


class Watch:
    """Told who waits where, and when steps are planned; whoever foretells waiting times overrides it."""

    def push(self, req: Request, key: Key) -> None: ...

    def remove(self, id: int, is_seated: bool = False) -> None: ...

    def begin(self, now: float) -> None: ...

    def end(self, now: float) -> None: ...


class Line:
    """A waiting request is in exactly one of the queue, the resume lane, the blocked, a leader's followers."""

    def __init__(self, ledger: KVLedger, rows: Sequence[Request | None], policy: Policy, watch: Watch | None) -> None:
        self.queue = policy.queue()
        self.watch = watch or Watch()
        self._is_watched = watch is not None
        self.blocked = BlockedOnPrefix(policy.rank)
        self._ledger = ledger
        self._rows = rows
        self._policy = policy
        turns, rank = count(), policy.rank
        self.resuming = RankQueue(lambda req: (rank(req), next(turns)))  # by when they were preempted
        self.protected = RankQueue(lambda req: (rank(req), -req.num_preempted, req.arrival))  # see `Seating`
        self._needed = NeededBlocks() if policy.keys_by_cache else None
        self._latest: dict[int, float] = {}  # id -> latest start, where there is one and it never ran
        self._expiring = RankQueue(lambda req: (self._latest[req.id],))
        self._followers: dict[int, list[Request]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self.resuming) + len(self.protected) + len(self.blocked) + len(self._leader_of)

    def push(self, req: Request, leader: Request | None) -> None:
        """Join the queue, or stand behind a leader whose prompt is not done."""
        if leader is None:
            self._stand(req)
        else:
            self._followers.setdefault(leader.id, []).append(req)
            self._leader_of[req.id] = leader.id
        latest = self._policy.latest_start(req)
        if latest < math.inf:
            self._latest[req.id] = latest
            self._expiring.push(req)

    def resume(self, req: Request, is_lack: bool) -> None:
        """Come back after a preemption."""
        if not is_lack and not self._policy.resumes_first:
            self._stand(req)
        else:
            self.watch.push(req, (self._policy.rank(req), -math.inf))
            self.resuming.push(req)

    def protect(self, req: Request) -> None:
        """Wait among the protected requests instead."""
        self.remove(req)
        self.watch.push(req, (self._policy.rank(req), -math.inf))
        self.protected.push(req)

    def _stand(self, req: Request) -> None:
        """Take a place in the queue, unless it is blocked."""
        self._tell(req)
        if not self.block(req):
            self.queue.push(req)
            self._note_need(req)

    def _tell(self, req: Request) -> None:
        """Tell the observer the request's place, or its new place."""
        if self._is_watched:
            self.watch.remove(req.id)
            self.watch.push(req, self._policy.key(req))

    def _note_need(self, req: Request) -> None:
        if self._needed is not None and (index := len(self._ledger.cached_blocks(req))) < len(req.keys):
            self._needed.note(req, req.keys[index])

    def _leave_queue(self, id: int) -> None:
        if self._needed is not None:
            self._needed.forget(id)
        self.queue.remove(id)

    def peek(self, now: float) -> Request | None:
        """Whoever is next."""
        head = self.queue.peek(now)
        back = self.resuming.peek(now)
        if back is None or (head is not None and self._policy.rank(head) < self._policy.rank(back)):
            return head
        return back

    def insists(self, req: Request, now: float) -> bool:
        """True if the next in line must not be passed over: small ones would take what a large one waits for."""
        return req in (self.resuming.peek(now), self.protected.peek(now)) or self.queue.insists(now)

    def admit(self, req: Request) -> None:
        """Whoever was next is given a seat."""
        self._forget(req.id)
        self.watch.remove(req.id, is_seated=True)
        if not (self.resuming.remove(req.id) or self.protected.remove(req.id)):
            if self._needed is not None:
                self._needed.forget(req.id)
            self.queue.admit(req)

    def behind(self, count: int, now: float) -> list[Request]:
        """Who may sit down in place of the next in line, which does not fit; nobody who would overtake a preempted."""
        back, rank = self.resuming.peek(now), self._policy.rank
        return [req for req in self.queue.first(count, now) if back is None or rank(req) < rank(back)]

    def remove(self, req: Request) -> None:
        """Leave, wherever it stands."""
        self.watch.remove(req.id)
        self._forget(req.id)
        if self.resuming.remove(req.id) or self.protected.remove(req.id) or self.blocked.remove(req.id):
            return
        leader = self._leader_of.pop(req.id, None)
        if leader is None:
            self._leave_queue(req.id)
        else:
            self._followers[leader].remove(req)

    def take_hopeless(self, now: float) -> list[Request]:
        """Some of those who wait in vain: they never ran, and their latest start is over. They stay in the line."""
        found: list[Request] = []
        while len(found) < MOST_SHED and (req := self._expiring.peek(now)) and self._latest[req.id] < now:
            self._forget(req.id)
            found.append(req)
        return found

    def _forget(self, id: int) -> None:
        """It starts or ends: its latest start does not matter any more."""
        if self._latest.pop(id, None) is not None:
            self._expiring.remove(id)

    def take_followers(self, leader: int) -> list[Request]:
        """Those behind this leader, who now stand nowhere."""
        followers = self._followers.pop(leader, [])
        for req in followers:
            del self._leader_of[req.id]
            self._forget(req.id)
        return followers

    def block(self, req: Request) -> bool:
        """Block a request that is in no queue, if a running row is computing the block it needs next."""
        if req.num_preempted or req.table:
            return False
        num_cached = len(self._ledger.cached_blocks(req))
        row = self._ledger.index.awaited(req.keys[num_cached]) if num_cached < len(req.keys) else None
        source = None if row is None else self._rows[row]
        return source is not None and self.blocked.block(req, source)

    def block_head(self, head: Request) -> bool:
        """Likewise the head of the queue, which then leaves it."""
        if not self.block(head):
            return False
        self._leave_queue(head.id)
        return True

    def published(self, key: bytes) -> None:
        """This block is in the cache from now on."""
        self.blocked.wake(key)
        if self._needed is not None:
            self._needed.published(key)

    def begin_step(self, step: int) -> None:
        """Return woken requests to the queue and place anew those whose key is stale, a bounded number of each."""
        self.blocked.begin_step(step)
        for req in self.blocked.take_ready():
            self._stand(req)
        for req in () if self._needed is None else self._needed.take_stale():
            self.queue.update(req)
            self._tell(req)
            self._note_need(req)

    def requests(self) -> list[Request]:
        """All that wait, in no order; for inspection, O(n)."""
        behind = [req for group in self._followers.values() for req in group]
        resuming = self.resuming.requests() + self.protected.requests()
        return self.queue.requests() + resuming + self.blocked.requests() + behind
