"""Requests of one session go to one replica while it has room: by the tenant or `user` that they name, and their salt.

Each replica has a number for each session, by a hash of both names, and the largest wins: when a replica comes or goes,
only its own sessions move. Requests that name no session go where the cost is smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import new_tokens
from headway.cluster.routes.cost import CostRoute
from headway.engine.client import Submit


class SessionRoute:
    """Equal sessions and equal replicas give equal choices, in every front and after a restart."""

    def __init__(self) -> None:
        self._others = CostRoute()
        self.scores: dict[str, float] = {}

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        if not submit.tenant and not submit.salt:
            chosen = self._others.choose(submit, replicas, index)
            self.scores = self._others.scores
            return chosen
        self.scores = {}
        session = f"{submit.tenant}\0{submit.salt}\0"
        best = max(replicas, key=lambda each: sha256(f"{session}{each.engine.name}".encode()).digest())
        return best, new_tokens(submit, [best], index)[0]


PLUGIN = SessionRoute
