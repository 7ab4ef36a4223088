"""The waiting queue: the policy's queue, and the requests that wait beside it for something of their own.

    queue        never ran, or preempted for priority: in the policy's order
    resuming     preempted for memory: before the others of their class
    protected    preempted as often as allowed, see `preemption.py`
    blocked      another request computes the block they need next, see `blocked.py`
    followers    later ones of n answers to a prompt: they join when the first has computed it

No call but `requests` visits the whole queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

from headway.core.blocked import BlockedOnPrefix
from headway.core.memory import Ledger
from headway.core.policy import Key, Policy
from headway.core.queue import RankQueue
from headway.core.request import Request
from headway.core.waits import EVER, Overtakings, WaitTotals
from headway.values.events import PreemptReason

MOST_EXPIRED = 256  # in one step, so that none takes long


class WaitingObserver:
    """Told which request waits where, and when steps are planned; a predictor of waiting times overrides it."""

    def push(self, req: Request, key: Key) -> None:
        """It waits at this place, or its place has changed."""

    def follow(self, req: Request) -> None: ...  # it waits for a leader's prompt, at no place of its own
    def remove(self, id: int, is_admitted: bool = False) -> None: ...
    def begin(self, now: float) -> None: ...
    def end(self, now: float) -> None: ...


class WaitingQueue:
    """A waiting request is in exactly one of the five places."""

    def __init__(
        self, ledger: Ledger, rows: Sequence[Request | None], policy: Policy, observer: WaitingObserver | None = None
    ) -> None:
        turns = count()
        self.resuming = RankQueue(lambda req: (policy.rank(req), next(turns)))
        self.protected = RankQueue(lambda req: (policy.rank(req), -req.num_preempted, req.arrival))
        self.waits = WaitTotals()
        self.blocked = BlockedOnPrefix(ledger, rows, policy, self.waits, self._observe)
        self.queue = self.blocked.queue
        self.observer = observer or WaitingObserver()
        self._overtakings = Overtakings()
        self._policy = policy
        self._expiring = RankQueue(lambda req: (req.latest_start,))  # where there is one and it never ran
        self._followers: dict[int, list[Request]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.queue) + self.num_preempted + len(self.blocked) + len(self._leader_of)

    @property
    def num_preempted(self) -> int:
        """Requests that were preempted for memory."""
        return len(self.resuming) + len(self.protected)

    def push(self, req: Request, leader: Request | None = None) -> None:
        """Enter the queue, or wait for a leader whose prompt is not done."""
        if req.number is None:
            req.number = self._overtakings.arrive()
        if not len(self):
            self._policy.context.reprice()
        self.waits.enter(req)
        if leader is None:
            self.blocked.enqueue(req, self._observe(req))
        else:
            self._followers.setdefault(leader.id, []).append(req)
            self._leader_of[req.id] = leader.id
            self.observer.follow(req)
        req.latest_start = self._policy.latest_start(req)
        if req.latest_start < math.inf:
            self._expiring.push(req)

    def resume(self, req: Request, reason: PreemptReason, is_protected: bool) -> None:
        """Wait again after a preemption: by its key, or before the others of its class."""
        self.waits.enter(req)
        if not is_protected and reason is PreemptReason.PRIORITY and not self._policy.resumes_first:
            self.blocked.enqueue(req, self._observe(req))
            return
        self.observer.push(req, (self._policy.rank(req), -math.inf))
        (self.protected if is_protected else self.resuming).push(req)

    def _observe(self, req: Request) -> Key:
        """Tell the observer the request's place, or its new place; requests that wake keep theirs."""
        key = self._policy.key(req)
        self.observer.push(req, key)
        return key

    def peek(self, now: float) -> Request | None:
        """The head: a preempted request before the others of its class. Protected ones wait apart."""
        head, back = self.queue.peek(now), self.resuming.peek(now)
        if back is None or (head is not None and self._policy.rank(head) < self._policy.rank(back)):
            return head
        return back

    def forbids_backfill(self, req: Request, now: float) -> bool:
        """True if the head must not be passed over: small requests would take what a large one waits for."""
        return req.id in self.resuming or req.id in self.protected or self.queue.forbids_backfill(now)

    def backfill_candidates(self, count: int, now: float) -> list[Request]:
        """Candidates for backfill when the head does not fit; none that would overtake a preempted request."""
        back, rank = self.resuming.peek(now), self._policy.rank
        return [req for req in self.queue.first(count, now) if back is None or rank(req) < rank(back)]

    def admit(self, req: Request) -> None:
        """The head, or one admitted by backfill, leaves for a row."""
        self.leave(req, is_admitted=True)
        if not req.num_preempted or not (self.resuming.remove(req.id) or self.protected.remove(req.id)):
            self.blocked.admit(req)

    def remove(self, req: Request) -> None:
        """Leave for good, wherever it waits."""
        leader = self._leader_of.pop(req.id, None)
        if leader is not None:
            self._followers[leader].remove(req)
            self.waits.unblock(req, EVER, None)
        elif not (self.resuming.remove(req.id) or self.protected.remove(req.id)):
            self.blocked.remove(req)
        self.leave(req, is_admitted=False)

    def leave(self, req: Request, is_admitted: bool) -> None:
        """It starts or ends: settle what it waited for; its latest start does not matter any more."""
        self.observer.remove(req.id, is_admitted)
        self.waits.leave(req)
        if req.number is not None and req.number >= 0:
            req.num_overtaken = self._overtakings.leave(req.number, is_admitted)
            req.number = -1
        self._expiring.remove(req.id)

    def take_expired(self, now: float) -> list[Request]:
        """Some of the requests that never ran and whose latest start is over; they stay where they wait."""
        found: list[Request] = []
        while len(found) < MOST_EXPIRED and (req := self._expiring.peek(now)) and req.latest_start < now:
            self._expiring.remove(req.id)
            found.append(req)
        return found

    def take_followers(self, leader: int) -> list[Request]:
        """The requests that wait for this leader, which now wait nowhere."""
        followers = self._followers.pop(leader, [])
        for req in followers:
            self.waits.unblock(req, EVER, None)
            self.waits.leave(req)
            del self._leader_of[req.id]
            self._expiring.remove(req.id)
        return followers

    def release_followers(self, leader: int) -> None:
        """The leader will not compute their prompt: its followers wait like any other request."""
        for req in self.take_followers(leader):
            self.push(req)

    def requests(self) -> list[Request]:
        """All that wait, in no order; for inspection, O(n)."""
        places = self.blocked, self.resuming, self.protected
        return sum(self._followers.values(), [req for place in places for req in place.requests()])
