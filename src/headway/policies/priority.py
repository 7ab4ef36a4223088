"""Strict classes: a smaller `priority` number goes first, and preempts a larger one if no slot is free.

Only a strictly more urgent request preempts another: requests of equal priority would preempt each other for ever.
"""

from __future__ import annotations

from typing import ClassVar

from headway.core.policy import Key, Policy
from headway.core.request import Request

SPARE = 0.1  # of the memory, left free by requests below the default priority: preempting them costs more


class Priority(Policy):
    """By class, then by arrival."""

    is_global_order: ClassVar[bool] = True

    def key(self, req: Request) -> Key:
        return (req.priority, req.arrival)

    def rank(self, req: Request) -> int:
        return req.priority

    def leaves_free(self, req: Request) -> float:
        return SPARE if req.priority > 0 else 0.0

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        return req.priority < victim.priority


PLUGIN = Priority
