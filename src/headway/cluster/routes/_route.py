"""What a route is: it chooses the replica that gets a request, by what replicas hold and how much they have to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway import plugins
from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.engine.client import Submit
from headway.errors import ConfigError
from headway.kv.prefix import chain_keys, chain_seed

_ALLOWED = "a name under headway.cluster.routes, or my.module:Thing that is called without arguments"


class Route(Protocol):
    """One per fleet; it may remember what it chose."""

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        """The replica for this request, and how many tokens of its prompt are to be computed there."""


def load_route(name: str) -> Route:
    """The route of this name, or my.module:Thing; ConfigError if it is none."""
    try:
        route = plugins.load("cluster.routes", name)()
    except TypeError as error:
        raise ConfigError(f"route is {name!r}, which cannot be made: {error}; allowed: {_ALLOWED}") from error
    if not callable(getattr(route, "choose", None)):
        raise ConfigError(f"route is {name!r}, which has no method choose; allowed: {_ALLOWED}")
    made: Route = route
    return made


def new_tokens(submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> list[int]:
    """By replica: how many tokens of the prompt are to be computed there."""
    info = replicas[0].engine.info
    num_prompt = len(submit.tokens)
    if info is None or not len(index):
        return [num_prompt] * len(replicas)
    seed = chain_seed(info.identity, submit.salt, info.adapters.get(submit.adapter, ""), submit.namespace)
    keys = chain_keys(submit.tokens, info.block_size, seed)
    held = index.num_held(keys, max(each.number for each in replicas) + 1)
    # At least one token is always computed: its row gives the first token of the answer.
    return [num_prompt - min(info.block_size * held[each.number], num_prompt - 1) for each in replicas]
