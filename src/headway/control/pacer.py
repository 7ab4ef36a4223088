"""How many prompt tokens a step may carry so that every running request keeps its ITL target.

The one knob: `target` seconds between two tokens, or fewer where a running request has a tighter ITL objective. The
cost model predicts how long a step takes; the time left of the target is filled with prompt tokens, in whole blocks,
less the usual prediction error of mixed steps. Where an executor pads such steps to certain sizes, tokens fill one of
these instead: padding takes as long as tokens do. At least one prompt progresses by `FLOOR` tokens. Where no row
decodes there is no target to keep.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from headway.control.costs import CostModel
from headway.core.policy import UNPACED
from headway.values.work import Work

FLOOR = 16
INFEASIBLE = 1.5  # times the step of one row, where even one row exceeds the target
FIRST = 128  # while the cost model is still learning


class TargetPacer:
    """`target` may be changed at any time; None: no target, a step is as large as the limits allow."""

    def __init__(
        self, costs: CostModel, target: float | None, block_size: int = 16, step_sizes: Sequence[int] = ()
    ) -> None:
        self.target = target
        self._costs = costs
        self._block_size = block_size
        self._step_sizes = step_sizes  # tokens that a step with chunks is padded to, ascending

    def tokens(self, work: Work, start: int, itl_target: float = math.inf) -> int:
        target = itl_target if self.target is None else min(self.target, itl_target)
        if target == math.inf or not work.decode:
            return UNPACED
        if not self._costs.is_ready:
            return max(0, FIRST - work.tokens)
        count = self._costs.chunk_within(target, work, start)
        if not self._step_sizes:
            count -= count % self._block_size
        count = max(0 if work.tokens else FLOOR, count)
        return self._filled(count, work) if count else 0

    def _filled(self, count: int, work: Work) -> int:
        """So many tokens that the step has a size it is padded to, the largest within `count`.

        Where that size leaves too few, the next one is filled, since the step is padded to it anyway.
        """
        sizes, before = self._step_sizes, work.decode + work.tokens
        at = bisect_right(sizes, before + count)
        if at == len(sizes):
            return count
        below = sizes[at - 1] if at else 0
        if below - before >= (1 if work.tokens else FLOOR):
            return below - before
        return 0 if work.tokens and below == before else sizes[at] - before

    def has_slot(self, work: Work) -> bool:
        """True if a step with this work, which has one more row, keeps the target.

        A target that one row alone exceeds is infeasible: rows are then admitted while they cost little more than one.
        """
        if self.target is None or not self._costs.is_ready:
            return True
        alone = self._costs.step(Work(decode=1))
        return self._costs.step(work) <= max(0.9 * self.target, INFEASIBLE * alone)
