"""Shortest remaining processing time, with limits: a request that is nearly done is not preempted.

A waiting request preempts the running one with the most left only if that clearly pays: 1.5 times its own remaining
cost, plus the victim's recompute, is less than what the victim has left.
"""

from __future__ import annotations

from typing import ClassVar

from headway.core.policy import Key, Policy
from headway.core.request import Request

CLEARLY = 1.5
NEARLY_DONE = 0.8  # of the expected answer


class ShortestRemaining(Policy):
    """Least remaining cost first."""

    is_global_order: ClassVar[bool] = True
    resumes_first: ClassVar[bool] = False
    keys_by_cache = True
    share_every = 10
    backfill_depth: ClassVar[int] = 16

    def key(self, req: Request) -> Key:
        return (self._left(req),)

    def priority_victim_key(self, req: Request) -> Key:
        return (self._left(req),)

    def preempts(self, req: Request, victim: Request, now: float) -> bool:
        if req.num_preempted or victim.num_output >= NEARLY_DONE * victim.likely_output:
            return False
        # The recompute delays all running requests.
        again = self.context.prefill_cost(self.context.num_computed(victim)) * self.context.costs.mean_decode
        return CLEARLY * self._left(req) + again < self._left(victim)

    def _left(self, req: Request) -> float:
        """Seconds of the engine that it still needs if it starts or resumes now."""
        left = req.likely_output - req.num_output
        if req.row >= 0:
            return self.context.decode_cost(len(req.tokens), left)
        uncached = max(1, len(req.tokens) - self.context.num_cached(req))
        return self.context.prefill_cost(uncached) + self.context.decode_cost(len(req.tokens), left)


PLUGIN = ShortestRemaining
