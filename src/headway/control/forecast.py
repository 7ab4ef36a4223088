"""How long a request that comes now will wait for its first token.

How much prompt stands before its place in the queue is known, and how fast it has been going.

Sums of tokens are kept in a tree over the order of keys, 64 branches to a node. Its leaves are the leading bits of
the key's numbers, which sort as the numbers do, so it needs no range and no rebuilding; only sums that are not zero are
stored. Adding and asking cost the tree's height, eight, whatever waits; a Fenwick tree took four times as long to add.
"""

from __future__ import annotations

import math
import struct

from headway.core.line import Watch
from headway.core.policy import Policy
from headway.core.queue import Key
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.values.work import Work

_WIDE, _LEVELS = 6, 8  # 44 bits and some: twelve for the class, 32 for what orders within it, a millionth of it
_MEMORY = 30.0  # seconds of waiting after which an admission counts for a third


def place(key: Key) -> int:
    """A number that sorts as the key does, as far as its bits reach; a key of one number has no class."""
    rank = int(key[0]) if len(key) > 1 else 0
    bits = int.from_bytes(struct.pack(">d", key[-1] if key else 0.0), signed=True)
    if bits < 0:  # negative numbers sort backwards by their bits
        bits = -(bits & ((1 << 63) - 1))
    return (min(2047, max(-2048, rank)) + 2048 << 32) + (bits >> 32) + (1 << 31)


class Backlog(Watch):
    """Every waiting request is in it with its prompt's tokens."""

    def __init__(self) -> None:
        self.total = 0
        self._sums: tuple[dict[int, int], ...] = tuple({} for _ in range(_LEVELS))  # from leaves to the root
        self._of: dict[int, tuple[int, int]] = {}  # id -> place, tokens
        self._admitted: dict[int, float] = {}  # by class: tokens given a seat while others waited, the older the less
        self._seconds = 0.0  # in which they were
        self._since: float | None = None  # when a step was planned last, if it left somebody waiting

    def push(self, req: Request, key: Key) -> None:
        at, count = place(key), len(req.tokens)
        self._of[req.id] = (at, count)
        self._add(at, count)

    def remove(self, id: int, is_seated: bool = False) -> None:
        at, count = self._of.pop(id, (0, 0))
        if count:
            self._add(at, -count)
        if is_seated and self._since is not None:  # says something about the pace only if somebody had been waiting
            self._admitted[at >> 32] = self._admitted.get(at >> 32, 0.0) + count

    def begin(self, now: float) -> None:
        """A step is about to be planned: time counts if somebody was left waiting by the last one."""
        if self._since is not None:
            passed = now - self._since
            kept = math.exp(-passed / _MEMORY)
            self._admitted = {rank: kept * count for rank, count in self._admitted.items() if count > 1e-3}
            self._seconds = self._seconds * kept + passed
            self._since = now

    def end(self, now: float) -> None:
        """A step is planned: who still waits will have waited for the next one."""
        self._since = now if self._of else None

    def ahead(self, key: Key) -> int:
        """Tokens of all who wait with a smaller key, or an equal one."""
        at, total = place(key) + 1, 0
        for known in self._sums:
            first = at >> _WIDE << _WIDE
            total += sum(known.get(spot, 0) for spot in range(first, at))
            at >>= _WIDE
        return total

    def rate(self, key: Key) -> float:
        """Prompt tokens per second that were given seats while others waited; not a number if that never was.

        More urgent classes are left out, for they go on overtaking; unless nobody else was given any.
        """
        rank = place(key) >> 32
        mine = sum(count for each, count in self._admitted.items() if each >= rank)
        count = mine or sum(self._admitted.values())
        return count / self._seconds if self._seconds > 0 and count > 0 else math.nan

    def _add(self, at: int, count: int) -> None:
        self.total += count
        for known in self._sums:
            left = known.get(at, 0) + count
            if left:
                known[at] = left
            else:
                del known[at]
            at >>= _WIDE


def predict_ttft(scheduler: Scheduler, req: Request) -> float | None:
    """Seconds until the first token of a request that would come now; None where nobody knows.

    What stands before it goes at the pace at which seats were given lately, unless somebody gets up for it; then its
    prompt shares steps with those under way, the shorter ones first.
    """
    backlog, costs = scheduler.line.watch, scheduler.costs
    if not costs.is_ready or not isinstance(backlog, Backlog):
        return None
    count, wait = req.num_prompt - scheduler.num_cached(req), 0.0
    seating = scheduler.seating
    if scheduler.num_waiting or not seating.num_seats or not seating.could_sit(req):
        key = scheduler.policy.key(req)
        ahead = backlog.ahead(key)
        if ahead or not _makes_way(scheduler, req):
            ahead, rate = ahead + req.num_prompt, backlog.rate(key)
            wait = ahead / rate if rate > 0 else costs.prefill(ahead)
    others = sum(min(count, len(each.tokens) - each.planned) for each in scheduler.filling.wanting())
    return wait + _prefill_time(scheduler, max(1, count) + others)


def _makes_way(scheduler: Scheduler, req: Request) -> bool:
    """True if a running request would get up for this one."""
    displaces, now = scheduler.policy.displaces, scheduler.life.now
    is_asked = type(scheduler.policy).displaces is not Policy.displaces
    return is_asked and any(displaces(req, victim, now) for victim in scheduler.rows.running())


def _prefill_time(scheduler: Scheduler, count: int) -> float:
    """Seconds that so many prompt tokens take beside those who decode now."""
    rows, life = scheduler.rows, scheduler.life
    num_steps = -(-count // max(1, scheduler.filling.room()))
    work = Work(decode=rows.num_decoding, context=rows.context(life.step), chunks=1)
    return num_steps * scheduler.costs.step(work) + scheduler.costs.prefill(count)
