"""How many engines a load needs: open requests for each engine, and the wait that the engines predict. Pure.

    more    requests / `requests` of the rule, or so many more that the predicted wait falls to `wait_s`
    fewer   if the requests fit into fewer with a fifth to spare, and none waits for half of `wait_s`

Between the two the number stays, so that a load at the border does not start and end engines by turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.cluster.client import FleetClient

_SPARE = 0.8  # of what the engines that are left would be given
_MOST_AT_ONCE = 2.0  # times the engines that are up, for a wait: it says that there are too few, and hardly how many


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """What a front knows of one moment."""

    num_requests: int  # that run or wait, wherever
    wait_s: float  # predicted, of a request that came now
    num_engines: int  # that take requests
    num_slots: int  # of one engine; 0: no engine has been there yet


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """When there are too few engines, and when too many."""

    requests: float | None  # for each engine; None: as many as it has slots
    wait_s: float


def engines_needed(load: ClusterLoad, now: int, rule: ScaleRule) -> int:
    """How many engines there should be, where there are to be `now`; some of these may be on their way."""
    each = rule.requests or load.num_slots
    if not each or not load.num_engines:  # nothing is known of what an engine can do
        return now
    needed = math.ceil(load.num_requests / each)
    if load.wait_s > rule.wait_s:
        factor = min(_MOST_AT_ONCE, load.wait_s / rule.wait_s)
        needed = max(needed, math.ceil(load.num_engines * factor))
    if needed >= now:
        return needed
    enough = max(1, math.ceil(load.num_requests / (_SPARE * each)))
    return enough if enough < now and load.wait_s <= rule.wait_s / 2 else now


def measure(client: FleetClient) -> ClusterLoad:
    """The load that a front sees: what engines said of all fronts' requests, and its own that wait for an engine."""
    up = [each for each in client.replicas if each.engine.takes_requests]
    held = sum(len(each.engine.entries) for each in client.replicas if not each.engine.takes_requests)
    infos = [info for each in client.replicas if (info := each.engine.info) is not None]
    return ClusterLoad(
        num_requests=held + sum(max(each.num_requests, len(each.engine.entries)) for each in up),
        wait_s=min((each.wait_s for each in up), default=0.0),
        num_engines=len(up),
        num_slots=min((info.max_num_seqs for info in infos), default=0),
    )
