"""Earliest deadline first: by the moment until which the first token, or the whole answer, is wanted.

A well-known baseline. Under overload it serves the requests that have just become infeasible, so that all of them miss
in turn; `slo` sheds those instead.
"""

from __future__ import annotations

from headway.core.policy import Key, Policy
from headway.core.request import Request


class EarliestDeadlineFirst(Policy):
    """`patience` is the TTFT objective, in seconds, of requests that give none."""

    def __init__(
        self, *, patience: float = 30.0, share_every: int | None = None, boost_after: float | None = None
    ) -> None:
        super().__init__(share_every=share_every, boost_after=boost_after)
        self.patience = patience

    def key(self, req: Request) -> Key:
        return (self.deadline(req),)

    def deadline(self, req: Request) -> float:
        """When it must have begun to answer."""
        wanted = self.patience if req.slo.ttft is None else req.slo.ttft
        if req.slo.deadline is not None:
            wanted = min(wanted, req.slo.deadline)
        return req.arrival + wanted


PLUGIN = EarliestDeadlineFirst
