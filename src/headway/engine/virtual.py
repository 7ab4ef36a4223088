"""An executor that charges a clock for every step by a fixed cost model: simulations and policy benches.

With the production scheduler, ledger and loop around it, the same arrivals give the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.control.costs import CostModel
from headway.engine.clock import VirtualClock
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.engine.stops import StopCalendar
from headway.values.plan import StepPlan, StepResult
from headway.values.work import Work


class VirtualExecutor(NullExecutor):
    """A step takes what `costs` says its work takes; `last_work` tells that of the plan just submitted."""

    def __init__(
        self,
        capacity: Capacity,
        clock: VirtualClock,
        costs: CostModel,
        last_work: Callable[[], Work],
        stops: Mapping[int, int],
    ) -> None:
        super().__init__(capacity)
        self._clock = clock
        self._costs = costs
        self._last_work = last_work
        self._calendar = StopCalendar(stops)
        self.last_was_mixed = False  # the step collected last carried a chunk

    def submit(self, plan: StepPlan) -> None:
        count = len(plan.decode) + sum(1 for chunk in plan.chunks if chunk.samples)
        elapsed = self._costs.step(self._last_work())
        self.last_was_mixed = bool(plan.chunks)
        self._results.append(
            StepResult(plan.id, [self._token] * count, stopped=self._calendar.rows(plan), elapsed=elapsed)
        )

    def collect(self) -> StepResult:
        result = super().collect()
        self._clock.advance(result.elapsed)
        return result
