"""An executor that charges a clock for every step by a fixed cost model: simulations and policy benches.

With the production scheduler, ledger and loop around it, the same arrivals give the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.control.costs import CostModel
from headway.engine.clock import VirtualClock
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.engine.stops import StopCalendar
from headway.values.plan import StepPlan, StepResult


class VirtualExecutor(NullExecutor):
    """A step takes what `costs` says the work of its plan takes."""

    def __init__(
        self,
        capacity: Capacity,
        clock: VirtualClock,
        costs: CostModel,
        stops: Mapping[int, int],
    ) -> None:
        super().__init__(capacity)
        self._clock = clock
        self._costs = costs
        self._calendar = StopCalendar(stops)
        self.last_was_mixed = False  # the step collected last carried a chunk

    def submit(self, plan: StepPlan) -> None:
        count = len(plan.decode) + sum(1 for chunk in plan.chunks if chunk.samples)
        elapsed = self._costs.step(plan.work)
        self.last_was_mixed = bool(plan.chunks)
        self._results.append(
            StepResult(plan.id, [self._token] * count, stopped=self._calendar.rows(plan), elapsed=elapsed)
        )

    def collect(self) -> StepResult:
        result = super().collect()
        self._clock.advance(result.elapsed)
        return result
