"""Where a request can fetch the beginning of its KV, when it goes to an engine that lacks it and another one has it.

A new engine warms up so, and a request that goes on after its engine ended finds what is left of its prefix in others.
It is a hint: the engine that gets it compares what fetching has taken with what computing would take (`engine.mover`),
and computes whatever does not come. Handoffs have a source of their own (`handoff`).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cluster.handoff import can_fetch
from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.engine.journal import OpenRequest
from headway.kv.prefix import chain_keys, chain_seed

LEAST_BLOCKS = 4  # that another one must have more: fewer are computed sooner than asked for


def note_source(entry: OpenRequest, goal: Replica, replicas: Sequence[Replica], index: HolderIndex) -> None:
    """Tell a request which engine has more of its prefix than the one that it goes to, if one has."""
    if entry.let_go is not None:
        return  # an engine keeps all of it
    entry.fetch_from, entry.fetch_tokens = "", 0
    info = goal.engine.info
    if info is None or not info.fetch_at or not len(index) or entry.submit.parent is not None:
        return
    others = [each for each in replicas if each is not goal and each.engine.is_up]
    others = [each for each in others if can_fetch(goal.engine, each.engine)]
    if not others:
        return
    submit = entry.submit
    seed = chain_seed(info.identity, submit.salt, info.adapters.get(submit.adapter, ""), submit.namespace)
    keys = chain_keys([*submit.tokens, *entry.tokens], info.block_size, seed)
    held = index.num_held(keys, max(each.number for each in replicas) + 1)
    best = max(others, key=lambda each: held[each.number])
    if held[best.number] - held[goal.number] >= LEAST_BLOCKS and best.engine.info is not None:
        entry.fetch_from = best.engine.info.fetch_at
        entry.fetch_tokens = held[best.number] * info.block_size
