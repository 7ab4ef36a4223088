"""The waiting queue: the policy's queue, and the requests that wait beside it for something of their own.

    queue        never ran, or displaced: in the policy's order
    resuming     preempted for lack of memory: before the others of their class
    protected    preempted as often as allowed, see `preemption.py`
    blocked      a running row computes the block they need next, see `blocked.py`
    followers    later ones of n answers to a prompt: they join when the first has computed it

Where the policy's keys depend on the cache, a request is placed anew when the block it needs next is published. No call
but `requests` visits the whole queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

from headway.core.blocked import BlockedOnPrefix, NeededBlocks
from headway.core.memory import Ledger
from headway.core.policy import Key, Policy
from headway.core.queue import RankQueue
from headway.core.request import Request
from headway.core.waits import Overtakings, WaitTotals

MOST_EXPIRED = 256  # in one step, so that none takes long


class WaitingObserver:
    """Told which request waits where, and when steps are planned; a predictor of waiting times overrides it."""

    def push(self, req: Request, key: Key) -> None: ...

    def remove(self, id: int, is_admitted: bool = False) -> None: ...

    def begin(self, now: float) -> None: ...

    def end(self, now: float) -> None: ...


class WaitingQueue:
    """A waiting request is in exactly one of the five places."""

    def __init__(
        self,
        ledger: Ledger,
        rows: Sequence[Request | None],
        policy: Policy,
        observer: WaitingObserver | None = None,
    ) -> None:
        turns = count()
        self.queue = policy.queue()
        self.resuming = RankQueue(lambda req: (policy.rank(req), next(turns)))
        self.protected = RankQueue(lambda req: (policy.rank(req), -req.num_preempted, req.arrival))
        self.blocked = BlockedOnPrefix(policy.rank)
        self.observer = observer or WaitingObserver()
        self.waits = WaitTotals()
        self._is_observed = observer is not None
        self._overtakings = Overtakings()
        self._ledger = ledger
        self._rows = rows
        self._policy = policy
        self._needed = NeededBlocks() if policy.keys_by_cache else None
        self._latest: dict[int, float] = {}  # id -> latest start, where there is one and it never ran
        self._expiring = RankQueue(lambda req: (self._latest[req.id],))
        self._followers: dict[int, list[Request]] = {}
        self._leader_of: dict[int, int] = {}

    def __len__(self) -> int:
        beside = len(self.resuming) + len(self.protected) + len(self.blocked) + len(self._leader_of)
        return len(self.queue) + beside

    def push(self, req: Request, leader: Request | None = None) -> None:
        """Enter the queue, or wait for a leader whose prompt is not done."""
        if req.number is None:
            req.number = self._overtakings.arrive()
        if leader is None:
            self._enqueue(req)
        else:
            self.waits.enter_prefix(req)
            self._followers.setdefault(leader.id, []).append(req)
            self._leader_of[req.id] = leader.id
        latest = self._policy.latest_start(req)
        if latest < math.inf:
            self._latest[req.id] = latest
            self._expiring.push(req)

    def resume(self, req: Request, is_lack: bool, is_protected: bool) -> None:
        """Come back after a preemption; what was displaced may have to take its place by key again."""
        if not is_protected and not is_lack and not self._policy.resumes_first:
            self._enqueue(req)
            return
        self.waits.enter(req)
        self.observer.push(req, (self._policy.rank(req), -math.inf))
        (self.protected if is_protected else self.resuming).push(req)

    def _enqueue(self, req: Request) -> None:
        """Take a place in the policy's queue, unless it is blocked."""
        self._observe(req)
        if not self._block(req):
            self.waits.enter(req)
            self.queue.push(req)
            self._note_need(req)

    def _observe(self, req: Request) -> None:
        """Tell the observer the request's place, or its new place."""
        if self._is_observed:
            self.observer.remove(req.id)
            self.observer.push(req, self._policy.key(req))

    def _note_need(self, req: Request) -> None:
        if self._needed is not None and (index := self._ledger.num_cached(req)) < len(req.keys):
            self._needed.note(req, req.keys[index])

    def peek(self, now: float) -> Request | None:
        """The head: a preempted request before the others of its class. Protected ones wait apart."""
        head, back = self.queue.peek(now), self.resuming.peek(now)
        if back is None or (head is not None and self._policy.rank(head) < self._policy.rank(back)):
            return head
        return back

    def forbids_backfill(self, req: Request, now: float) -> bool:
        """True if the head must not be passed over: small requests would take what a large one waits for."""
        return req.id in self.resuming or req.id in self.protected or self.queue.forbids_backfill(now)

    def behind(self, count: int, now: float) -> list[Request]:
        """Candidates for backfill when the head does not fit; none that would overtake a preempted request."""
        back, rank = self.resuming.peek(now), self._policy.rank
        return [req for req in self.queue.first(count, now) if back is None or rank(req) < rank(back)]

    def admit(self, req: Request) -> None:
        """The head, or one admitted by backfill, leaves for a row."""
        self.leave(req, is_admitted=True)
        if not req.num_preempted or not (self.resuming.remove(req.id) or self.protected.remove(req.id)):
            if self._needed is not None:
                self._needed.forget(req.id)
            self.queue.admit(req)

    def remove(self, req: Request) -> None:
        """Leave for good, wherever it waits."""
        self.leave(req, is_admitted=False)
        if self.resuming.remove(req.id) or self.protected.remove(req.id) or self.blocked.remove(req.id):
            return
        leader = self._leader_of.pop(req.id, None)
        if leader is None:
            self._leave_queue(req.id)
        else:
            self._followers[leader].remove(req)

    def leave(self, req: Request, is_admitted: bool) -> None:
        """It starts or ends: settle what it waited for; its latest start does not matter any more."""
        if self._is_observed:
            self.observer.remove(req.id, is_admitted)
        self.waits.leave(req)
        if req.number is not None and req.number >= 0:
            req.num_overtaken = self._overtakings.leave(req.number, is_admitted)
            req.number = -1
        if self._latest:
            self._forget_latest(req.id)

    def _leave_queue(self, id: int) -> None:
        if self._needed is not None:
            self._needed.forget(id)
        self.queue.remove(id)

    def _forget_latest(self, id: int) -> None:
        if self._latest.pop(id, None) is not None:
            self._expiring.remove(id)

    def take_expired(self, now: float) -> list[Request]:
        """Some of the requests that never ran and whose latest start is over; they stay where they wait."""
        found: list[Request] = []
        while len(found) < MOST_EXPIRED and (req := self._expiring.peek(now)) and self._latest[req.id] < now:
            self._forget_latest(req.id)
            found.append(req)
        return found

    def take_followers(self, leader: int) -> list[Request]:
        """The requests that wait for this leader, which now wait nowhere."""
        followers = self._followers.pop(leader, [])
        for req in followers:
            self.waits.leave(req)
            del self._leader_of[req.id]
            self._forget_latest(req.id)
        return followers

    def release_followers(self, leader: int) -> None:
        """The leader will not compute their prompt: its followers wait like any other request."""
        for req in self.take_followers(leader):
            self.push(req)

    def block_head(self, head: Request) -> bool:
        """Block the head of the policy's queue if a running row is computing the block it needs next."""
        if not self._block(head):
            return False
        self._leave_queue(head.id)
        return True

    def _block(self, req: Request) -> bool:
        if req.num_preempted or req.table:
            return False
        num_cached = self._ledger.num_cached(req)
        row = self.blocked.row_of.get(req.keys[num_cached]) if num_cached < len(req.keys) else None
        source = None if row is None else self._rows[row]
        if source is None or not self.blocked.block(req, source):
            return False
        self.waits.leave(req)
        self.waits.enter_prefix(req)
        return True

    def published(self, key: bytes, row: int) -> None:
        """This block, computed by this row, is in the cache from now on."""
        self.blocked.settle(key, row)
        if self._needed is not None:
            self._needed.published(key)

    def begin_step(self, step: int, now: float) -> None:
        """Return woken requests to the queue and place anew those whose key is stale, a bounded number of each."""
        self.waits.begin_step(step, now)
        self.blocked.begin_step(step)
        for req in self.blocked.take_ready():
            self.waits.leave(req)
            self._enqueue(req)
        for req in () if self._needed is None else self._needed.take_stale():
            self.queue.update(req)
            self._observe(req)
            self._note_need(req)

    def requests(self) -> list[Request]:
        """All that wait, in no order; for inspection, O(n)."""
        places = self.queue, self.resuming, self.protected, self.blocked
        return [req for place in places for req in place.requests()] + [
            req for followers in self._followers.values() for req in followers
        ]
