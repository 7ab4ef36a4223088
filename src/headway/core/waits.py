"""Why requests wait, and how long: totals per reason, at no cost per waiting request.

The admit phase ends for exactly one reason per step, and every queued request waits for that reason. `WaitTotals` adds
the step to that reason's total; a request notes the totals when it is queued, and the differences are its waiting time
when it leaves. A request blocked on a prefix and a paused row have intervals of their own. `Overtakings` counts, for
the policy's part in it, the later arrivals that were admitted first.
"""

from __future__ import annotations

from bisect import bisect_left

from headway.core.request import Request
from headway.values.waits import Waited, WaitReason

MOST_OVERTAKINGS = 4096


class WaitTotals:
    """Steps and seconds that queued requests have waited in all, by reason."""

    def __init__(self) -> None:
        self._totals = (Waited(0, 0.0),) * len(WaitReason)  # replaced and never changed: requests keep it as a mark
        self._step = 0
        self._now = 0.0  # when the step under way began
        self._reason: WaitReason | None = None  # of that step; None: nothing was left waiting
        self._queued: dict[int, tuple[Waited, ...]] = {}  # id -> the totals when it was queued
        self._blocked: dict[int, Waited] = {}  # id -> step and time since which it waits for a prefix

    def begin_step(self, step: int, now: float) -> None:
        """The time since the last call is over, and the step if a plan was made: add it to the total of its reason."""
        if self._reason is not None:
            self._totals = self._after(self._reason, step - self._step, now - self._now)
        self._step, self._now, self._reason = step, now, None

    def _after(self, reason: WaitReason, steps: int, seconds: float) -> tuple[Waited, ...]:
        total = self._totals[reason]
        more = Waited(total.steps + steps, total.seconds + seconds)
        return (*self._totals[:reason], more, *self._totals[reason + 1 :])

    def wait_for(self, reason: WaitReason) -> None:
        """The requests left in the queue wait for this until the next step."""
        self._reason = reason

    def enter(self, req: Request) -> None:
        """The request is queued; of the step under way the part before its arrival is not its own."""
        reason, late = self._reason, req.arrival - self._now
        self._queued[req.id] = self._totals if reason is None or late <= 0.0 else self._after(reason, 0, late)

    def enter_prefix(self, req: Request) -> None:
        """The request waits for a prefix that another one computes."""
        self._blocked[req.id] = Waited(self._step, max(self._now, req.arrival))

    def leave(self, req: Request) -> None:
        """The request stops waiting where it waited: add what it waited to its own account."""
        mark = self._queued.pop(req.id, None)
        if mark is not None:
            for reason, before, after in zip(WaitReason, mark, self._totals, strict=True):
                if after is not before:
                    add(req, reason, after.steps - before.steps, after.seconds - before.seconds)
        elif req.id in self._blocked:
            step, since = self._blocked.pop(req.id)
            add(req, WaitReason.PREFIX, self._step - step, self._now - since)


def add(req: Request, reason: WaitReason, steps: int, seconds: float) -> None:
    """Add to what a request has waited for a reason."""
    if steps > 0 or seconds > 0.0:
        before = req.waited.get(reason, Waited(0, 0.0))
        req.waited[reason] = Waited(before.steps + steps, before.seconds + max(0.0, seconds))


class Overtakings:
    """How many later arrivals were admitted before a request; counts no further than `MOST_OVERTAKINGS`."""

    def __init__(self) -> None:
        self._next = 0
        self._admitted: list[int] = []  # arrival numbers, ascending; most are added near the end

    def arrive(self) -> int:
        """The number of a new arrival."""
        self._next += 1
        return self._next - 1

    def leave(self, number: int, is_admitted: bool) -> int:
        """An arrival leaves the queue for the first time; how many later ones were admitted before it."""
        at = bisect_left(self._admitted, number)
        num_later = min(len(self._admitted) - at, MOST_OVERTAKINGS)
        if is_admitted:
            self._admitted.insert(at, number)
            if len(self._admitted) > 2 * MOST_OVERTAKINGS:
                del self._admitted[:MOST_OVERTAKINGS]
        return num_later
