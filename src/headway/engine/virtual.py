"""An executor that charges a clock for every step by a fixed cost model: simulations and policy benches.

With the production scheduler, ledger and loop around it, the same arrivals give the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.control.costs import CostModel
from headway.core.work import Work
from headway.engine.clock import VirtualClock
from headway.engine.executor import Capacity
from headway.engine.null import NullExecutor
from headway.values.plan import Join, Samples, StepPlan, StepResult


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
        self._stop_after = stops  # the caller may add to it
        self._seat: dict[int, Join] = {}  # row -> how its request sat down
        self._stops_at: dict[int, list[Join]] = {}  # plan -> those who stop in it, unless they get up before
        self.last_was_mixed = False  # the step collected last carried a chunk

    def submit(self, plan: StepPlan) -> None:
        """A decoding row gets one token per plan, so its end stands in a calendar and no step looks at every row."""
        for row in plan.leaves:
            self._seat.pop(row, None)
        for join in plan.joins:
            self._seat[join.row] = join
        for chunk in plan.chunks:
            if chunk.samples is Samples.TOKEN:
                join = self._seat[chunk.row]
                stop = self._stop_after.get(join.id)
                if stop is not None:
                    given = len(join.tokens) - join.num_prompt
                    self._stops_at.setdefault(plan.id + stop - given - 1, []).append(join)
        due = self._stops_at.pop(plan.id, ())
        stopped = sorted(join.row for join in due if self._seat.get(join.row) is join)
        count = len(plan.decode) + sum(1 for chunk in plan.chunks if chunk.samples)
        elapsed = self._costs.step(self._last_work())
        self.last_was_mixed = bool(plan.chunks)
        self._results.append(StepResult(plan.id, [self._token] * count, stopped=stopped, elapsed=elapsed))

    def collect(self) -> StepResult:
        result = super().collect()
        self._clock.advance(result.elapsed)
        return result
