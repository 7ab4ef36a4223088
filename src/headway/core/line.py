"""Everybody who waits: in the queue, in the lane of the preempted, beside it for a block, or behind a leader.

The preempted come back before those of their class who never ran. A request whose next block some running row is
computing right now steps aside until that block is published, at most `PATIENCE` steps without progress, instead of
computing it again. The later ones of n answers to a prompt stand behind the first and join when its prompt is done.
All of them are waiting, and nobody is overtaken for good: who steps aside returns to the place its key gives.
"""

from __future__ import annotations

import heapq
import math
from itertools import count

from headway.core.policy import Key, Policy
from headway.core.queue import RankQueue
from headway.core.request import Request
from headway.kv.prefix import PrefixIndex
from headway.values.states import State

PATIENCE = 4  # steps
MOST_SHED = 256  # in one step, so that none takes long


class Watch:
    """Told who waits where, and when steps are planned; whoever foretells waiting times overrides it."""

    def push(self, req: Request, key: Key) -> None: ...

    def remove(self, id: int, is_seated: bool = False) -> None: ...

    def begin(self, now: float) -> None: ...

    def end(self, now: float) -> None: ...


class Line:
    """A waiting request is in exactly one of the queue, the resume lane, the waiting room, a leader's followers."""

    def __init__(self, index: PrefixIndex, policy: Policy, watch: Watch | None = None) -> None:
        self.queue = policy.queue()
        self.watch = watch or Watch()
        self._index = index
        self._policy = policy
        turns, rank = count(), policy.rank
        self.resuming = RankQueue(lambda req: (rank(req), next(turns)))  # by when they were preempted
        self.protected = RankQueue(lambda req: (rank(req), -req.num_preempted, req.arrival))  # see `Seating`
        self._hopeless: list[tuple[float, int, Request]] = []  # by the moment from which on they are
        self._aside: dict[int, tuple[Request, bytes]] = {}
        self._by_key: dict[bytes, list[int]] = {}
        self._wakes: dict[int, list[int]] = {}  # step -> ids whose patience ends
        self._since: dict[int, tuple[int, int]] = {}  # id -> (blocks it had, step) of its last progress
        self._followers: dict[int, list[Request]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self.resuming) + len(self.protected) + len(self._aside) + len(self._leader_of)

    def push(self, req: Request, leader: Request | None) -> None:
        """Join the queue, or stand behind a leader whose prompt is not done."""
        if leader is None:
            self._stand(req)
        else:
            self._followers.setdefault(leader.id, []).append(req)
            self._leader_of[req.id] = leader.id
        latest = self._policy.latest_start(req)
        if latest < math.inf:
            heapq.heappush(self._hopeless, (latest, req.id, req))

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
        self.queue.push(req)
        self.watch.push(req, self._policy.key(req))

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
        self._since.pop(req.id, None)
        self.watch.remove(req.id, is_seated=True)
        if not (self.resuming.remove(req.id) or self.protected.remove(req.id)):
            self.queue.admit(req)

    def behind(self, count: int, now: float) -> list[Request]:
        """Who may sit down in place of the next in line, which does not fit; nobody who would overtake a preempted."""
        back, rank = self.resuming.peek(now), self._policy.rank
        return [req for req in self.queue.first(count, now) if back is None or rank(req) < rank(back)]

    def remove(self, req: Request) -> None:
        """Leave, wherever it stands."""
        self.watch.remove(req.id)
        self._since.pop(req.id, None)
        if self.resuming.remove(req.id) or self.protected.remove(req.id) or self.queue.remove(req.id):
            return
        leader = self._leader_of.pop(req.id, None)
        if leader is not None:
            self._followers[leader].remove(req)
        else:
            del self._aside[req.id]

    def take_hopeless(self, now: float) -> list[Request]:
        """Some of those who wait in vain: they never ran, and their latest start is over. They stay in the line."""
        found: dict[int, Request] = {}  # who stood behind a leader first came twice
        while self._hopeless and self._hopeless[0][0] < now and len(found) < MOST_SHED:
            req = heapq.heappop(self._hopeless)[2]
            if req.state is State.WAITING and not req.num_preempted:
                found[req.id] = req
        return list(found.values())

    def take_followers(self, leader: int) -> list[Request]:
        """Those behind this leader, who now stand nowhere."""
        followers = self._followers.pop(leader, [])
        for req in followers:
            del self._leader_of[req.id]
        return followers

    def wait_for_prefix(self, head: Request, num_cached: int, step: int) -> bool:
        """Let the head of the queue step aside if the block it needs next is being computed."""
        if head.num_preempted or num_cached >= len(head.keys):
            return False
        key = head.keys[num_cached]
        if self._index.awaited(key) is None:
            return False
        had, since = self._since.get(head.id, (-1, step))
        if had != num_cached:
            since = step
        if step - since >= PATIENCE:
            return False
        self._since[head.id] = (num_cached, since)
        self.queue.remove(head.id)
        self._aside[head.id] = (head, key)
        self._by_key.setdefault(key, []).append(head.id)
        self._wakes.setdefault(since + PATIENCE, []).append(head.id)
        return True

    def wake(self, key: bytes) -> None:
        """This block is there, or will never be: whoever waits for it goes back to the queue."""
        for id in self._by_key.pop(key, ()):
            self._return(id)

    def wake_due(self, step: int) -> None:
        """Those whose patience ends with this step go back to the queue."""
        for id in self._wakes.pop(step, ()):
            self._return(id)

    def requests(self) -> list[Request]:
        """Everybody, in no order; for inspection, O(n)."""
        behind = [req for group in self._followers.values() for req in group]
        resuming = self.resuming.requests() + self.protected.requests()
        return self.queue.requests() + resuming + [req for req, _ in self._aside.values()] + behind

    def _return(self, id: int) -> None:
        req, _ = self._aside.pop(id, (None, None))
        if req is not None:
            self.queue.push(req)
