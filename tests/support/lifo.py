"""Last come, first served: a policy that does not keep the order of arrival, and says so."""

from __future__ import annotations

from typing import ClassVar

from headway.core.policy import Key, Policy
from headway.core.request import Request


class LastComeFirstServed(Policy):
    """Every tenth admission takes the oldest, or it would wait for as long as others come."""

    keeps_arrival_order: ClassVar[bool] = False
    share_every = 10

    def key(self, req: Request) -> Key:
        return (-req.arrival,)
