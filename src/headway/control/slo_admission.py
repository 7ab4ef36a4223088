"""Whom to turn away at the door: requests that would come too late even if they were let in.

A request that says by when it wants its first token, under a policy that sheds, is told at once if that is out of
reach, instead of standing in a queue until it is hopeless.

Each class has a door. It shuts when somebody would be later than promised by `MARGIN`, and opens when somebody would
be in time; a door that has just moved stays as it is for `HOLD` seconds. An open door keeps nobody out: the hopeless
are still shed where they stand. A shut one keeps out only those who would be late, so nobody is lost by its being shut.
Where a policy has a queue of its own, its keys foretell nothing, and there is no door.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from headway.core.policy import Policy
from headway.core.request import Request
from headway.values.work import Costs, Work

MARGIN = 0.2
HOLD = 5.0


class _State(NamedTuple):
    is_shut: bool = False
    since: float = -math.inf


class SloAdmission:
    """Knows, by class, whether it is shut and since when."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self._policy = policy
        self._costs = costs
        self._states: dict[int, _State] = {}
        self._is_there = not policy.overrides("queue")

    def rejects(self, req: Request, predicted: float, now: float) -> float | None:
        """Seconds after which it may come again, as far as one can tell; None: let it in."""
        if not self._is_there or self._policy.latest_start(req) == math.inf:
            return None
        rank = self._policy.rank(req)
        is_shut, since = self._states.get(rank, _State())
        in_time, too_late = self._allowed(req, 0.0), self._allowed(req, MARGIN)
        moves = predicted <= in_time if is_shut else predicted > too_late
        if moves and now - since >= HOLD:
            is_shut = not is_shut
            self._states[rank] = _State(is_shut, now)
        return predicted - in_time if is_shut and predicted > too_late else None

    def _allowed(self, req: Request, margin: float) -> float:
        """Seconds that its first token may take, and some more."""
        slo, allowed = req.slo, math.inf
        if slo.ttft is not None:
            allowed = slo.ttft * (1 + margin)
        if slo.deadline is not None:
            remaining = (req.likely_output - 1) * self._costs.step(Work(decode=1, context=req.num_prompt))
            allowed = min(allowed, slo.deadline * (1 + margin) - remaining)
        return allowed
