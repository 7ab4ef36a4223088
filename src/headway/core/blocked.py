"""The policy's queue, and the requests blocked on a prefix: another request, the source, computes what they need next.

Such a request waits for that block instead of computing it again. The source runs, or is queued and goes before it by
key and by age: of thousands that share a prefix few are in the queue, and no other request waits behind them. A request
blocks on the *last* block it shares with its source, so it wakes once. A row that publishes nothing for `STALLED_AFTER`
steps is stalled: what waits for it wakes and computes for itself.

    enqueue, block_head   ──▶ group of (last shared block) ──▶ wake: published, given up or stalled
                                                                 │
    queue  ◀── refill: a few, and another for each one admitted ─┘

A common system prompt can block a hundred thousand requests, so no call here visits all members of a group.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from headway.core.memory import Ledger
from headway.core.policy import Key, Policy
from headway.core.queue import RankQueue
from headway.core.request import Request
from headway.core.waits import WaitTotals
from headway.kv.prefix import num_shared
from headway.values.states import Moment

STALLED_AFTER = 4  # steps
MOST_MOVES = 64  # heads that are blocked, and keys made anew, in one step; each takes 5 to 10 us
MOST_TURNS = 4  # in a step: two woken requests return to the queue in each, besides one for each one admitted


@dataclass(slots=True, eq=False)
class _PrefixGroup:
    account: Hashable
    members: RankQueue
    begun: Moment | None = None  # since when a row computes the prefix; None: the source is queued
    woken: Moment | None = None


@dataclass(slots=True, eq=False)
class _Need:
    """A queued request and the block it needs next. Others block behind the first by key, at its account's place."""

    req: Request
    block: bytes
    place: Hashable
    key: Key


_Heaps = tuple[list[tuple[Key, int, int, _PrefixGroup]], list[tuple[Key, int, int, _PrefixGroup]]]
"""Ready groups by their first members: by rank and key, and by age."""


class BlockedOnPrefix:
    """A blocked request is in exactly one group; a group waits for a block, or it is ready."""

    def __init__(
        self,
        ledger: Ledger,
        rows: Sequence[Request | None],
        policy: Policy,
        waits: WaitTotals,
        observe: Callable[[Request], Key],
    ) -> None:
        self.queue = policy.queue()
        self._ranked = self.queue if isinstance(self.queue, RankQueue) and not policy.overrides("queue") else None
        self._ledger, self._rows, self._policy, self._waits = ledger, rows, policy, waits
        self._account: Callable[[Request], Hashable] = attrgetter("account") if policy.has_shares else lambda _: None
        self._observe = observe  # to be told of requests whose place changes
        self.is_active = ledger.caching  # a static batch waits for no prefix: it starts together
        self._step = 0
        self._group_of: dict[int, _PrefixGroup] = {}
        self._groups: dict[bytes, dict[Hashable, _PrefixGroup]] = {}  # by the block they wait for, and account
        self.row_of: dict[bytes, int] = {}  # block -> the row that is about to compute it
        self._sources: set[int] = set()  # queued requests that others are blocked behind
        self._checks: dict[int, dict[int, tuple[Request, int]]] = {}  # by step: rows that must have published more
        self._woken: list[_PrefixGroup] = []  # since the step began
        self._ready: OrderedDict[Hashable, _Heaps] = OrderedDict()  # by account
        self._entries = count()
        self._need_of: dict[int, _Need] = {}
        self._needs: dict[bytes, dict[Hashable, _Need]] = {}  # by block and place
        self._stale: deque[_Need] = deque()  # need another block than they did: their key may have changed

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def has_ready(self) -> bool:
        """True if requests have woken that are not in the queue yet."""
        return bool(self._woken or self._ready)

    def enqueue(self, req: Request, key: Key) -> None:
        """Give a request a place in the queue, or block it."""
        if self._is_blocked(req, key):
            return
        if self._ranked is not None:
            self._ranked.push(req, key)  # the policy's key, which need not be made again
        else:
            self.queue.push(req)

    def _is_blocked(self, req: Request, key: Key) -> bool:
        """Block a request if another one computes the block it needs next, or goes before it and will; else note it."""
        block = self._next_block(req)
        if block is None:
            return False
        need = _Need(req, block, req.id, key)
        if not req.num_preempted and not req.table:
            source = self._computed_by(block)
            if source is not None and self._block(req, key, source):
                return True
            account, needs = self._account(req), self._needs.get(block, {})
            first = needs.get(account)
            if first is not None and (first.key, first.req.id) < (key, req.id):
                # It goes before by key; where it is older too, a rule for the oldest reaches it first as well.
                if first.req.arrival <= req.arrival and self._block(req, key, first.req):
                    return True
            else:
                need.place = account
                if first is not None:  # stays in the queue, where a rule for the oldest finds it
                    first.place = first.req.id
                    needs[first.place] = first
        self._need_of[req.id] = need
        self._needs.setdefault(block, {})[need.place] = need
        return False

    def _next_block(self, req: Request) -> bytes | None:
        """The first block of its known tokens that is not in the cache, if it could be."""
        if not self.is_active:
            return None
        num_cached = self._ledger.num_cached(req)
        return req.keys[num_cached] if num_cached < len(req.keys) else None

    def block_head(self, head: Request) -> bool:
        """Block the head of the queue if a running row is computing the block it needs next."""
        if head.num_preempted or head.table or (source := self._computed_by(self._next_block(head))) is None:
            return False
        if not self._block(head, self._policy.key(head), source):
            return False
        self._leave_queue(head)
        return True

    def _computed_by(self, block: bytes | None) -> Request | None:
        """The running request that is about to compute this block."""
        row = None if block is None else self.row_of.get(block)
        return None if row is None else self._rows[row]

    def _block(self, req: Request, key: Key, source: Request) -> bool:
        """Block a request on the blocks that `source` computes, unless that one is less urgent."""
        rank = self._policy.rank
        if rank(source) > rank(req):
            return False  # it may be given hardly any tokens
        last = req.keys[num_shared(req.keys, source.keys) - 1]
        account, groups = self._account(req), self._groups.setdefault(last, {})
        group = groups.get(account)
        if group is None:
            group = groups[account] = _PrefixGroup(account, RankQueue(self._policy.key, has_ages=True))
        if source.row < 0:
            self._sources.add(source.id)
        elif group.begun is None:
            group.begun = self._waits.moment
            self._check_later(source)
        group.members.push(req, (rank(req), *key))
        self._group_of[req.id] = group
        return True

    def admit(self, req: Request) -> None:
        """A queued request leaves for a row, and one that has woken takes its place in the queue."""
        self._forget(req.id)
        self.queue.admit(req)
        if self._ready:
            self._return(self._account(req))

    def admitted(self, req: Request) -> None:
        """It has its row and table now, and its row computes for requests blocked behind it.

        Of several rows that compute a block the last counts, since the others may be stalled.
        """
        if self.is_active:
            self.row_of.update(dict.fromkeys(req.keys[req.published :], req.row))
        if req.id in self._sources:
            self._sources.remove(req.id)
            self._check_later(req)
            self.wake(req.keys[: req.published])  # in the cache: it will not publish them
            for block in filter(self._groups.__contains__, req.keys[req.published :]):
                for group in self._groups[block].values():
                    group.begun = group.begun or self._waits.moment

    def remove(self, req: Request) -> None:
        """A queued or blocked request ends; what was blocked behind it wakes."""
        if not self._leave_group(req):
            self._leave_queue(req)
        if req.id in self._sources:
            self._sources.remove(req.id)
            self.wake(req.keys)

    def _leave_group(self, req: Request) -> bool:
        group = self._group_of.pop(req.id, None)
        if group is None:
            return False
        group.members.remove(req.id)
        self._waits.unblock(req, group.begun, group.woken)
        return True

    def _leave_queue(self, req: Request) -> None:
        self._forget(req.id)
        self.queue.remove(req.id)

    def _forget(self, id: int) -> None:
        need = self._need_of.pop(id, None)
        needs = None if need is None else self._needs.get(need.block)
        if need is not None and needs is not None and needs.get(need.place) is need:  # else it is stale
            del needs[need.place]
            if not needs:
                del self._needs[need.block]

    def published(self, blocks: Sequence[bytes], row: int) -> None:
        """These blocks, computed by this row, are in the cache from now on."""
        for block in blocks:
            if self.row_of.get(block) == row:
                del self.row_of[block]
            if block in self._needs:
                self._stale.extend(self._needs.pop(block).values())
        if self._groups:
            self.wake(blocks)  # also what waits for a block that another row was about to compute

    def settle(self, blocks: Sequence[bytes], row: int) -> None:
        """The row has published these blocks, or has given them up; another one may be about to compute them too."""
        for block in blocks:
            if self.row_of.get(block) == row:
                del self.row_of[block]
                self.wake((block,))

    def wake(self, blocks: Iterable[bytes]) -> None:
        """What waits for these blocks waits no longer."""
        for block in filter(self._groups.__contains__, blocks):
            self._woken.extend(self._groups.pop(block).values())

    def _check_later(self, source: Request) -> None:
        self._checks.setdefault(self._step + STALLED_AFTER, {})[source.id] = source, source.published

    def begin_step(self, step: int) -> None:
        """A row that has published nothing for `STALLED_AFTER` steps is no source any more: what waits for it wakes."""
        self._step = step
        for source, published in self._checks.pop(step, {}).values():
            if source.published > published:
                self._check_later(source)
            elif source.row >= 0:
                self.settle(source.keys[source.published :], source.row)
        for group in self._woken:
            group.woken = self._waits.moment
            self._add_ready(group, by_age=False)
            self._add_ready(group, by_age=True)
        self._woken.clear()

    def refill(self) -> None:
        """Return some ready requests to the queue, and place anew some whose key is stale."""
        for by_age in (False, True) * MOST_TURNS:  # by age for rules that look at the oldest in the queue
            if not self._ready:
                break
            self._return(next(iter(self._ready)), by_age)
            if by_age and self._ready:
                self._ready.move_to_end(next(iter(self._ready)))
        for _ in range(min(len(self._stale), MOST_MOVES)):
            need = self._stale.popleft()
            if self._need_of.get(need.req.id) is need:
                del self._need_of[need.req.id]
                if self._policy.keys_by_cache:
                    self.queue.update(need.req)
                    need.key = self._observe(need.req)
                if self._is_blocked(need.req, need.key):
                    self._leave_queue(need.req)

    def _return(self, account: Hashable, by_age: bool = False) -> None:
        """The first of an account's ready groups by rank and key, or its oldest; another account's if it has none."""
        if account not in self._ready:
            account = next(iter(self._ready))
        heaps, is_returned = self._ready[account], False
        while heaps[by_age] and not is_returned:
            key, id, _, group = heapq.heappop(heaps[by_age])
            req = group.members.oldest() if by_age else group.members.peek(0.0)
            if req is not None and req.id == id:  # else it has left meanwhile
                self._leave_group(req)
                self.enqueue(req, self._policy.key(req) if by_age else key[1:])
                is_returned = True
            self._add_ready(group, by_age)
        if heaps == ([], []):
            del self._ready[account]

    def _add_ready(self, group: _PrefixGroup, by_age: bool) -> None:
        req = group.members.oldest() if by_age else group.members.peek(0.0)
        if req is not None:
            key = (req.arrival,) if by_age else (self._policy.rank(req), *self._policy.key(req))
            heaps = self._ready.setdefault(group.account, ([], []))
            heapq.heappush(heaps[by_age], (key, req.id, next(self._entries), group))

    def requests(self) -> list[Request]:
        """All that are queued or blocked, in no order; for inspection, O(n)."""
        groups = {id(group): group for group in self._group_of.values()}
        return self.queue.requests() + [req for group in groups.values() for req in group.members.requests()]
