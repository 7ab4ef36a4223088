"""The replica with the fewest requests, whatever it holds."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import new_tokens
from headway.engine.client import Submit


class LeastLoadedRoute:
    """Of equally busy replicas the one with the fewest prompt tokens to compute."""

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        best = min(replicas, key=lambda each: (each.num_requests, each.num_prefill, each.number))
        return best, new_tokens(submit, [best], index)[0]


PLUGIN = LeastLoadedRoute
