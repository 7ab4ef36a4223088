"""The replica with the smallest product of prompt tokens to compute and requests that share its steps.

    cost = (prompt tokens to compute there, this request's included) x (requests there, this one included)

The first factor draws a request to the replica that holds its prefix, the second away from one that is busy; a product
needs no weight between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import new_tokens
from headway.engine.client import Submit


class CostRoute:
    """Of equal replicas the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}  # by number: when it was chosen last
        self._count = 0

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        new = new_tokens(submit, replicas, index)

        def cost(at: int) -> tuple[int, int]:
            replica = replicas[at]
            busy = (replica.num_prefill + new[at]) * (replica.num_requests + 1)
            return busy, self._chosen.get(replica.number, -1)

        best = min(range(len(replicas)), key=cost)
        self._count += 1
        self._chosen[replicas[best].number] = self._count
        return replicas[best], new[best]


PLUGIN = CostRoute
