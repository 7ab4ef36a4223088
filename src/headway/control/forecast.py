"""Predicts the TTFT of a request that arrives now.

The prediction is the number of prompt tokens ahead of it in the queue over the rate at which they were admitted lately.

Sums of tokens are kept in a tree over the order of keys, 64 branches to a node. Its leaves are the leading bits of
the key's numbers, which sort as the numbers do, so it needs no range and no rebuilding; only sums that are not zero are
stored. Adding and asking cost the tree's height, eight, whatever waits; a Fenwick tree took four times as long to add.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.queue import Key
from headway.core.request import Request
from headway.core.waiting import WaitingObserver
from headway.values.work import Costs, Work

_WIDE, _LEVELS = 6, 8  # 44 bits and some: twelve for the class, 32 for what orders within it, a millionth of it
_MEMORY = 30.0  # seconds of waiting after which an admission counts for a third


def place(key: Key) -> int:
    """A number that sorts as the key does, as far as its bits reach; a key of one number has no class."""
    rank = int(min(2047, max(-2048, key[0]))) if len(key) > 1 else 0  # also of infinity, or of no number
    bits = int.from_bytes(struct.pack(">d", key[-1] if key else 0.0), signed=True)
    if bits < 0:  # negative numbers sort backwards by their bits
        bits = -(bits & ((1 << 63) - 1))
    return (rank + 2048 << 32) + (bits >> 32) + (1 << 31)


class Backlog(WaitingObserver):
    """Every waiting request is in it with its prompt's tokens."""

    def __init__(self) -> None:
        self.total = 0
        self._sums: tuple[dict[int, int], ...] = tuple({} for _ in range(_LEVELS))  # from leaves to the root
        self._of: dict[int, tuple[int, int]] = {}  # id -> place, tokens
        self._admitted: dict[int, float] = {}  # by class: tokens admitted while others waited, decaying with age
        self._seconds = 0.0  # in which they were admitted, decaying likewise
        self._since: float | None = None  # time of the last plan, if requests waited after it

    def push(self, req: Request, key: Key) -> None:
        if req.id in self._of:
            self.remove(req.id)
        at, count = place(key), len(req.tokens)
        self._of[req.id] = (at, count)
        self._add(at, count)

    def remove(self, id: int, is_admitted: bool = False) -> None:
        at, count = self._of.pop(id, (0, 0))
        if count:
            self._add(at, -count)
        if is_admitted and self._since is not None:  # admissions count for the rate only while others wait
            self._admitted[at >> 32] = self._admitted.get(at >> 32, 0.0) + count

    def begin(self, now: float) -> None:
        """A step is about to be planned: time counts if requests waited after the last plan."""
        if self._since is not None:
            passed = max(0.0, now - self._since)  # clocks may be set back
            kept = math.exp(-passed / _MEMORY)
            self._admitted = {rank: kept * count for rank, count in self._admitted.items() if count > 1e-3}
            self._seconds = self._seconds * kept + passed
            self._since = now

    def end(self, now: float) -> None:
        """A step is planned: remember the time if requests still wait."""
        self._since = now if self._of else None

    def ahead(self, key: Key) -> int:
        """Tokens of all waiting requests with a smaller or equal key."""
        at, total = place(key) + 1, 0
        for known in self._sums:
            first = at >> _WIDE << _WIDE
            total += sum(known.get(spot, 0) for spot in range(first, at))
            at >>= _WIDE
        return total

    def rate(self, key: Key) -> float:
        """Prompt tokens per second that were admitted while others waited; NaN if there were none.

        More urgent classes are left out, since they go first; unless no other class was admitted.
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


class Prefill(NamedTuple):
    """A prompt under way: tokens of it that are computed or in flight, and tokens that are not."""

    start: int
    left: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request that comes now finds; a snapshot of values that keeps no hold on the scheduler."""

    num_prompt: int
    num_uncached: int  # of its prompt
    key: Key  # its place in the queue
    must_wait: bool  # others wait, or there is no slot or no memory for it
    preempts: bool  # a running request is preempted for it
    prefills: Sequence[Prefill]  # prompts under way that are as urgent as it is, or more
    decode: Work  # the running rows that decode
    room: int  # prompt tokens that the next step may carry


def predict_ttft(arrival: Arrival, backlog: Backlog, costs: Costs) -> float:
    """Seconds until the first token of a request that comes now.

    The prompts that wait before it go at the pace at which requests were admitted lately, unless a running request is
    preempted for it; then its prompt shares steps with those under way, the shorter ones first.
    """
    wait = 0.0
    if arrival.must_wait:
        ahead = backlog.ahead(arrival.key)
        if ahead or not arrival.preempts:
            # Prompts are admitted whole: at a pace of tokens, half of its own have their turn before it is admitted.
            tokens, rate = ahead + arrival.num_prompt / 2, backlog.rate(arrival.key)
            # Without a known pace, as many prompts of this length: one prompt as long as all would cost the square.
            each = costs.prefill(arrival.num_prompt) / arrival.num_prompt
            wait = tokens / rate if rate > 0 else tokens * each
    return wait + _prefill_time(arrival, costs)


def _prefill_time(arrival: Arrival, costs: Costs) -> float:
    """Seconds that its prompt takes, beside the rows that decode and as much of each prompt under way."""
    count = max(1, arrival.num_uncached)
    others = [Prefill(start, min(count, left)) for start, left in arrival.prefills]
    num_steps = -(-(count + sum(other.left for other in others)) // max(1, arrival.room))
    seconds = num_steps * costs.step(arrival.decode._replace(chunks=1)) + costs.prefill(count)
    return seconds + sum(costs.prefill(other.left, other.start) for other in others)
