"""One replica after the other, whatever it holds and has to do: a baseline to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import new_tokens
from headway.engine.client import Submit


class RoundRobinRoute:
    """The next number after the last one, of those that take requests."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        after = [each for each in replicas if each.number > self._last]
        best = min(after or replicas, key=lambda each: each.number)
        self._last = best.number
        return best, new_tokens(submit, [best], index)[0]


PLUGIN = RoundRobinRoute
