"""When requests end that end by a stop token nobody else knows of: for simulations and benches.

A decoding row gets one token per plan that it is in, and it is in all but those it sits out. So its end stands in a
calendar and no step looks at every row, unless somebody sits out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headway.values.plan import Join, Samples, StepPlan


class StopCalendar:
    """Is shown every plan, in order. `stop_after` maps ids to tokens of answer; the caller may add to it."""

    def __init__(self, stop_after: Mapping[int, int]) -> None:
        self._stop_after = stop_after
        self._joined: dict[int, Join] = {}  # row -> how its request sat down
        self._decoding: set[int] = set()
        self._sat_out: Counter[int] = Counter()  # row -> plans, since its end was noted
        self._stops_at: dict[int, list[Join]] = {}  # plan -> those who stop in it, unless they get up or sit out before

    def rows(self, plan: StepPlan) -> list[int]:
        """Those that get their last token in this plan."""
        for row in plan.leaves:
            self._joined.pop(row, None)
            self._decoding.discard(row)
            self._sat_out.pop(row, None)
        if len(plan.decode) < len(self._decoding):
            self._sat_out.update(self._decoding.difference(plan.decode))
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
            if late := self._sat_out.pop(join.row, 0):
                self._stops_at.setdefault(plan.id + late, []).append(join)
                due = [other for other in due if other is not join]
        return sorted(join.row for join in due)
