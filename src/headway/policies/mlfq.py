"""Multi-level feedback: requests with little service go first; one that has used up its quantum may be preempted.

A request enters at the level that its prompt's cost gives it and falls one level with each quantum it uses, each
twice the one before. It needs no prediction. A request that has waited `promote_after` seconds goes to the top level.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

from headway.core.policy import Key, Policy
from headway.core.queue import OrderedQueue
from headway.core.request import Request

LEVELS = 16
MOST_PROMOTED = 16  # in one look


class LevelQueue(OrderedQueue):
    """First come, first served within a level, lower levels first."""

    def __init__(self, level_of: Callable[[Request], int], promote: Callable[[Request], None], after: float) -> None:
        self._level_of = level_of
        self._promote = promote
        self._after = after
        self._levels: list[OrderedDict[int, tuple[Request, float]]] = [OrderedDict() for _ in range(LEVELS)]
        self._where: dict[int, int] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, id: int) -> bool:
        return id in self._where

    def push(self, req: Request) -> None:
        assert req.id not in self._where, f"request {req.id} is in the queue already"
        self._enter(req, self._level_of(req))

    def _enter(self, req: Request, level: int) -> None:
        self._levels[level][req.id] = (req, max(self._now, req.arrival))
        self._where[req.id] = level

    def peek(self, now: float) -> Request | None:
        self._now = now
        num_promoted = 0
        for level in self._levels[1:]:
            while level and num_promoted < MOST_PROMOTED:
                req, since = next(iter(level.values()))
                if now - since < self._after:
                    break
                self.remove(req.id)
                self._promote(req)
                self._enter(req, 0)
                num_promoted += 1
        for level in self._levels:
            if level:
                return next(iter(level.values()))[0]
        return None

    def level(self, id: int) -> int:
        return self._where[id]

    def forbids_backfill(self, now: float) -> bool:
        return False  # backfill passes over no request of a higher level

    def admit(self, req: Request) -> None:
        self.remove(req.id)

    def remove(self, id: int) -> bool:
        level = self._where.pop(id, None)
        if level is None:
            return False
        del self._levels[level][id]
        return True

    def requests(self) -> list[Request]:
        return [req for level in self._levels for req, _ in level.values()]


class MultiLevelFeedback(Policy):
    """`quantum` is the first level's, in seconds of the engine."""

    is_global_order: ClassVar[bool] = True
    resumes_first: ClassVar[bool] = False

    def __init__(self, *, quantum: float = 0.05, promote_after: float = 3.0) -> None:
        super().__init__()
        self.quantum = quantum
        self.promote_after = promote_after
        self._had: dict[int, float] = {}  # service that a promoted request had when it started anew
        self._queue: LevelQueue | None = None

    def queue(self) -> OrderedQueue:
        self._queue = LevelQueue(self.level, self._start_anew, self.promote_after)
        return self._queue

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        assert self._queue is not None
        if req.num_preempted or req.id not in self._queue or self._queue.level(req.id) >= self.level(victim):
            return False
        # Its recompute delays all running requests: at most half of the quantum it is in.
        return 2.0 * self._again(victim) * self.context.costs.mean_decode < self.quantum * 2.0 ** self.level(victim)

    def priority_victim_key(self, req: Request) -> Key:
        return (self.level(req),)

    def on_finish(self, req: Request) -> None:
        self._had.pop(req.id, None)

    def level(self, req: Request) -> int:
        """The level of a request by the service that its tokens took."""
        had = self._had.get(req.id)
        if had is None:
            entry = max(0, math.ceil(math.log2(max(self._prompt(req), 1e-9) / self.quantum)))
            used = self._answer(req)
        else:
            entry, used = 0, max(0.0, self._answer(req) - had)
        # The quanta from the level of entry on are q * 2^entry, q * 2^(entry + 1), ...; their sum doubles each time.
        fallen = math.floor(math.log2(used / (self.quantum * 2.0 ** min(entry, LEVELS)) + 1))
        return min(LEVELS - 1, entry + fallen)

    def _start_anew(self, req: Request) -> None:
        self._had[req.id] = self._answer(req)

    def _again(self, req: Request) -> float:
        costs, num_computed = self.context.costs, self.context.num_computed(req)
        return costs.prefill(num_computed) if costs.is_ready else 1e-3 * num_computed

    def _prompt(self, req: Request) -> float:
        costs = self.context.costs
        return costs.prefill(req.num_prompt) if costs.is_ready else 1e-3 * req.num_prompt

    def _answer(self, req: Request) -> float:
        costs = self.context.costs
        if not req.num_output:
            return 0.0
        return costs.decode(req.num_prompt, req.num_output) if costs.is_ready else 4e-3 * req.num_output


PLUGIN = MultiLevelFeedback
