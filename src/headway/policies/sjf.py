"""Shortest job first, by what the whole request will cost the engine: its uncached prompt and its expected answer.

The key is made when a request comes and again when the block it needs next is published. Aging that is linear in the
time waited orders as `cost + aging * arrival` does, so it needs no second look at any request.
"""

from __future__ import annotations

from typing import ClassVar

from headway.core.policy import Key, Policy
from headway.core.request import Request


class ShortestJobFirst(Policy):
    """Least cost first; every tenth admission takes the oldest."""

    keys_by_cache = True
    share_every = 10
    backfill_depth: ClassVar[int] = 16

    def __init__(self, *, aging: float = 0.0, share_every: int | None = None, boost_after: float | None = None) -> None:
        super().__init__(share_every=share_every, boost_after=boost_after)
        self.aging = aging

    def key(self, req: Request) -> Key:
        return (self.context.request_cost(req) + self.aging * req.arrival,)


PLUGIN = ShortestJobFirst
