"""SLO admission: rejects a request at arrival if its predicted TTFT misses its objective.

It applies to requests with a TTFT or deadline objective under a policy that sheds: a request that would miss is
rejected at once instead of waiting in the queue until it is shed.

Each class rejects or accepts, with hysteresis: it begins to reject when a request would miss by more than `MARGIN`, and
stops when one would be in time, but keeps its state for at least `HOLD` seconds. A class that accepts rejects no
request; the queue sheds infeasible ones. A class that rejects turns down only requests that would miss. Where a policy
has its own kind of queue, keys do not predict the wait, and nothing is rejected.
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
    is_rejecting: bool = False
    since: float = -math.inf


class SloAdmission:
    """Knows, by class, whether it rejects and since when."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self._policy = policy
        self._costs = costs
        self._states: dict[int, _State] = {}
        self._is_active = not policy.overrides("queue")

    def rejects(self, req: Request, predicted: float, now: float) -> float | None:
        """Seconds after which the client may retry, by the prediction; None: accepted."""
        if not self._is_active or self._policy.latest_start(req) == math.inf:
            return None
        rank = self._policy.rank(req)
        is_rejecting, since = self._states.get(rank, _State())
        in_time, too_late = self._allowed(req, 0.0), self._allowed(req, MARGIN)
        changes = predicted <= in_time if is_rejecting else predicted > too_late
        if changes and now - since >= HOLD:
            is_rejecting = not is_rejecting
            self._states[rank] = _State(is_rejecting, now)
        return predicted - in_time if is_rejecting and predicted > too_late else None

    def _allowed(self, req: Request, margin: float) -> float:
        """Seconds that its first token may take, and some more."""
        slo, allowed = req.slo, math.inf
        if slo.ttft is not None:
            allowed = slo.ttft * (1 + margin)
        if slo.deadline is not None:
            remaining = (req.likely_output - 1) * self._costs.step(Work(decode=1, context=req.num_prompt))
            allowed = min(allowed, slo.deadline * (1 + margin) - remaining)
        return allowed
