"""The plans in which requests end by a stop token that the scheduler cannot know: for simulations and benches.

A decoding row gets one token per plan, except while it is paused. So its end is in a calendar, and no step visits every
row unless rows are paused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headway.values.plan import Join, Samples, StepPlan


class StopCalendar:
    """Is shown every plan, in order. `stop_after` maps ids to tokens of answer; the caller may add to it."""

    def __init__(self, stop_after: Mapping[int, int]) -> None:
        self._stop_after = stop_after
        self._joined: dict[int, Join] = {}  # row -> the join of its request
        self._decoding: set[int] = set()
        self._num_paused: Counter[int] = Counter()  # row -> plans, since its end was noted
        self._stops_at: dict[int, list[Join]] = {}  # plan -> joins that stop in it, unless preempted or paused before

    def rows(self, plan: StepPlan) -> list[int]:
        """Those that get their last token in this plan."""
        for row in plan.leaves:
            self._joined.pop(row, None)
            self._decoding.discard(row)
            self._num_paused.pop(row, None)
        if len(plan.decode) < len(self._decoding):
            self._num_paused.update(self._decoding.difference(plan.decode))
        for join in plan.joins:
            self._joined[join.row] = join
        for chunk in plan.chunks:
            if chunk.samples is Samples.TOKEN:
                join = self._joined[chunk.row]
                self._decoding.add(chunk.row)
                stop = self._stop_after.get(join.id)
                if stop is not None:
                    given = len(join.tokens) - join.num_prompt
                    self._stops_at.setdefault(plan.id + stop - given - 1, []).append(join)
        due = [join for join in self._stops_at.pop(plan.id, ()) if self._joined.get(join.row) is join]
        for join in due:
            if late := self._num_paused.pop(join.row, 0):
                self._stops_at.setdefault(plan.id + late, []).append(join)
                due = [other for other in due if other is not join]
        return sorted(join.row for join in due)
