"""Everybody who waits: in the queue, beside it for a block that is being computed, or behind a leader.

A request whose next block some running row is computing right now steps aside until that block is published,
at most `PATIENCE` steps without progress, instead of computing it again. The later ones of n answers to a prompt
stand behind the first and join when its prompt is done. Both are waiting, and nobody is overtaken for good: who
steps aside returns to the place its key gives.
"""

from __future__ import annotations

from headway.core.policy import Policy
from headway.core.prefix import PrefixIndex
from headway.core.queue import RankQueue
from headway.core.request import Request

PATIENCE = 4  # steps


class Line:
    """A waiting request is in exactly one of the queue, the waiting room, a leader's followers."""

    def __init__(self, index: PrefixIndex, policy: Policy) -> None:
        self.queue = RankQueue()
        self._index = index
        self._policy = policy
        self._aside: dict[int, tuple[Request, bytes]] = {}
        self._by_key: dict[bytes, list[int]] = {}
        self._wakes: dict[int, list[int]] = {}  # step -> ids whose patience ends
        self._since: dict[int, tuple[int, int]] = {}  # id -> (blocks it had, step) of its last progress
        self._followers: dict[int, list[Request]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._aside) + len(self._leader_of)

    def push(self, req: Request, leader: Request | None) -> None:
        """Join the queue, or stand behind a leader whose prompt is not done."""
        if leader is None:
            self.queue.push(req, self._policy.key(req))
        else:
            self._followers.setdefault(leader.id, []).append(req)
            self._leader_of[req.id] = leader.id

    def resume(self, req: Request) -> None:
        self.queue.resume(req)

    def peek(self) -> Request | None:
        """Whoever is next."""
        return self.queue.peek()

    def pop(self) -> Request | None:
        """Admit whoever is next."""
        req = self.queue.pop()
        if req is not None:
            self._since.pop(req.id, None)
        return req

    def remove(self, req: Request) -> None:
        """Leave, wherever it stands."""
        self._since.pop(req.id, None)
        if self.queue.remove(req.id):
            return
        leader = self._leader_of.pop(req.id, None)
        if leader is not None:
            self._followers[leader].remove(req)
        else:
            del self._aside[req.id]

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
        self.queue.pop()
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
        return self.queue.requests() + [req for req, _ in self._aside.values()] + behind

    def _return(self, id: int) -> None:
        req, _ = self._aside.pop(id, (None, None))
        if req is not None:
            self.queue.push(req, self._policy.key(req))
