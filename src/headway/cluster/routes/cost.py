"""The replica that holds most of a prompt, unless it is busier than the others; then the cheapest of all.

    holders   replicas that lack at most an eighth more of the prompt than the one that lacks least,
              and have at most a quarter more requests than the mean, and four
    cost      (prompt tokens to compute there, this request's included) x (requests there, this one included)

The cheapest holder gets the request; where every one of them is too busy, the cheapest replica, which holds the prefix
from then on. So a prefix spreads over as many replicas as its requests keep busy, and no further. The first factor of
the cost counts what is computed, the second how many wait for that; a product needs no weight between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import new_tokens
from headway.engine.client import Submit

_NEAR = 8  # a holder lacks at most one part in so many of the cached tokens
_BUSIER = 1.25  # times the mean of all requests
_SPARE = 4  # and so many: with few requests a ratio says little


class CostRoute:
    """Of equal replicas the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}  # by number: when it was chosen last
        self._count = 0
        self.scores: dict[str, float] = {}  # by name of replica, of the last choice

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        new = new_tokens(submit, replicas, index)
        costs = [(each.num_prefill + new[at]) * (each.num_requests + 1) for at, each in enumerate(replicas)]
        self.scores = {each.engine.name: cost for each, cost in zip(replicas, costs, strict=True)}
        chosen = [self._chosen.get(each.number, -1) for each in replicas]
        among = _holders(len(submit.tokens), new, replicas) or range(len(replicas))
        best = min(among, key=lambda at: (costs[at], chosen[at]))
        self._count += 1
        self._chosen[replicas[best].number] = self._count
        return replicas[best], new[best]


def _holders(num_prompt: int, new: Sequence[int], replicas: Sequence[Replica]) -> list[int]:
    """Replicas with most of the prompt that are not too busy, by their place in the list."""
    enough = min(new) + (num_prompt - min(new)) // _NEAR
    most = _BUSIER * (sum(each.num_requests for each in replicas) + 1) / len(replicas) + _SPARE
    return [at for at, each in enumerate(replicas) if new[at] <= enough and each.num_requests + 1 <= most]


PLUGIN = CostRoute
