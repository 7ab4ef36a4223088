"""Queues within a queue, each with its share of the service: tenants, and lanes of tenants.

A group pays for the service it gets; the group that has paid least, by weight, is next. When a group with no waiting
request gets one, its account is raised to the lowest of the groups that wait: idle time earns no credit. A group whose
requests are all blocked on a prefix is not idle: the one that comes back arrived before the last one left. No slot and
no memory is kept free for a group without waiting requests.

    lanes      interactive ───────── batch            shares of 80 and 20
    tenants    ann   bob   cem       ann   dee        equal shares, or by weight
    requests   order of the policy, within each
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.core.queue import OrderedQueue, first_live
from headway.core.request import Account, Request

MOST_DEBTS = 1024  # kept of groups without waiting requests


@dataclass(slots=True)
class _ShareGroup:
    queue: OrderedQueue
    weight: float
    paid: float = 0.0  # service over weight
    stamp: int = 0  # of its one live entry in the heap
    emptied: float = -math.inf  # when the last of its requests left


class ShareQueue:
    """The group that has paid least is next; a heap of groups, corrected lazily, so a charge is O(log groups)."""

    def __init__(
        self,
        name_of: Callable[[Account], str],
        inner: Callable[[], OrderedQueue],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.weights = dict(weights or {})
        self._name_of = name_of
        self._inner = inner
        self._groups: dict[str, _ShareGroup] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._where: dict[int, str] = {}
        self._next_stamp = 0
        self._sweep_at = 64
        self._now = 0.0
        self._level = 0.0  # what the group that was served last had paid

    def __len__(self) -> int:
        return len(self._where)

    def push(self, req: Request) -> None:
        name = self._name_of(req.account)
        group = self._groups.get(name)
        if group is None:
            self._forget_the_idle()
            group = self._groups[name] = _ShareGroup(self._inner(), self.weights.get(name, 1.0))
        if not len(group.queue):
            if req.num_preempted or req.arrival > group.emptied:
                poorest = self._poorest()
                group.paid = max(group.paid, self._level if poorest is None else self._groups[poorest].paid)
            self._enter(name, group)
        group.queue.push(req)
        self._where[req.id] = name

    def update(self, req: Request) -> None:
        self._groups[self._where[req.id]].queue.update(req)

    def peek(self, now: float) -> Request | None:
        self._now = now
        name = self._poorest()
        return None if name is None else self._groups[name].queue.peek(now)

    def first(self, count: int, now: float) -> list[Request]:
        """Requests of the group that has paid least, then of the next."""
        live = [self._groups[entry[2]] for entry in first_live(self._heap, 2 * count, self._is_live)]
        found: list[Request] = []
        for group in sorted(live, key=lambda group: (group.paid, group.stamp)):  # what an entry says may be old
            if len(found) < count:
                found += group.queue.first(count - len(found), now)
        return found

    def forbids_backfill(self, now: float) -> bool:
        name = self._poorest()
        return name is not None and self._groups[name].queue.forbids_backfill(now)

    def admit(self, req: Request) -> None:
        name = self._where.pop(req.id)
        group = self._groups[name]
        self._level = group.paid
        group.queue.admit(req)
        if not len(group.queue):
            group.emptied = self._now

    def remove(self, id: int) -> bool:
        name = self._where.pop(id, None)
        if name is None:
            return False
        group = self._groups[name]
        is_there = group.queue.remove(id)
        if not len(group.queue):
            group.emptied = self._now
        return is_there

    def charge(self, account: Account, amount: float) -> None:
        name = self._name_of(account)
        group = self._groups.get(name)
        if group is None:  # was forgotten while idle: it owes nothing that the level does not cover
            return
        group.paid += amount / group.weight  # its entry is corrected when it comes up: what is paid only grows
        group.queue.charge(account, amount)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Other shares from now on; what was paid stays paid."""
        self.weights = dict(weights)
        for name, group in self._groups.items():
            group.weight = self.weights.get(name, 1.0)

    def queues(self) -> list[OrderedQueue]:
        """Those of the groups there are now."""
        return [group.queue for group in self._groups.values()]

    def paid(self, name: str) -> float:
        """Service that this group has paid for, over its weight."""
        return self._groups[name].paid if name in self._groups else 0.0

    def requests(self) -> list[Request]:
        return [req for group in self._groups.values() for req in group.queue.requests()]

    def _enter(self, name: str, group: _ShareGroup) -> None:
        self._next_stamp += 1
        group.stamp = self._next_stamp
        heapq.heappush(self._heap, (group.paid, group.stamp, name))
        if len(self._heap) > 2 * len(self._groups) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        group = self._groups.get(entry[2])
        return group is not None and group.stamp == entry[1] and len(group.queue) > 0

    def _poorest(self) -> str | None:
        heap = self._heap
        while heap:
            paid, stamp, name = heap[0]
            group = self._groups.get(name)
            if group is None or group.stamp != stamp or not len(group.queue):  # `_is_live`, without a call
                heapq.heappop(heap)
            elif paid < group.paid:
                self._next_stamp += 1
                group.stamp = self._next_stamp
                heapq.heapreplace(heap, (group.paid, group.stamp, name))
            else:
                return name
        return None

    def _forget_the_idle(self) -> None:
        """Drop groups that would come back at the level anyway, and the oldest debts when there are very many.

        Once per doubling, so O(1) for each group that comes.
        """
        if len(self._groups) < self._sweep_at:
            return
        owing = [name for name, group in self._groups.items() if not len(group.queue) and group.paid > self._level]
        forgiven = set(owing[:-MOST_DEBTS])
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if len(group.queue) or (group.paid > self._level and name not in forgiven)
        }
        self._sweep_at = max(64, 2 * len(self._groups))
