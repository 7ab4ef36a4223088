"""Why requests wait, and how long: totals per reason, at no cost per waiting request.

The admit phase ends for exactly one reason per step, and every queued request waits for that reason. `WaitTotals` adds
the step to that reason's total; a request notes the totals when it is queued, and the differences are its waiting time
when it leaves. While a row computes the prefix it is blocked on, a request waits for that instead; a paused row has
intervals of its own. `Overtakings` counts, for the policy's part in it, the later arrivals that were admitted first.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from itertools import count

from headway.core.request import Request
from headway.values.states import NOT_YET, Moment, Waited, WaitReason

MOST_OVERTAKINGS = 4096
EVER = Moment(-1, -math.inf, {})  # before any step


class WaitTotals:
    """Steps and seconds that queued requests have waited in all, by reason."""

    def __init__(self) -> None:
        self.moment = Moment(0, 0.0, {})  # of the step under way
        self.reason: WaitReason | None = None  # of the requests left in the queue by that step; None: there are none

    def begin_step(self, step: int, now: float) -> None:
        """The time since the last call is over, and the step if a plan was made: add it to the total of its reason."""
        last = self.moment
        self.moment, self.reason = last.plus(self.reason, step - last.step, now - last.now), None

    def enter(self, req: Request) -> None:
        """The request waits; of the step under way the part before it came here is not its own."""
        late = came(req) - self.moment.now
        req.queued = self.moment.plus(self.reason, 0, late) if late > 0.0 else self.moment

    def leave(self, req: Request) -> None:
        """The request stops waiting: add what it waited to its own account."""
        if req.queued is not None:
            _charge(req, req.queued, self.moment)
            req.queued = None

    def unblock(self, req: Request, begun: Moment | None, woken: Moment | None) -> None:
        """It waits on as others do; from `begun` until `woken`, or until now, it was blocked on a prefix."""
        if begun is not None and req.queued is not None:
            begun, woken = max(req.queued, begun, key=lambda moment: moment[:2]), woken or self.moment
            _charge(req, req.queued, begun)
            add(req, WaitReason.PREFIX, woken.step - begun.step, woken.now - begun.now)
            req.queued = woken


def _charge(req: Request, since: Moment, until: Moment) -> None:
    for reason, after in until.totals.items():
        before = since.totals.get(reason, NOT_YET)
        if after is not before:
            add(req, reason, after.steps - before.steps, after.seconds - before.seconds)


def add(req: Request, reason: WaitReason, steps: int, seconds: float) -> None:
    """Add to what a request has waited for a reason."""
    if steps > 0 or seconds > 0.0:
        before = req.waited.get(reason, NOT_YET)
        req.waited[reason] = Waited(before.steps + steps, before.seconds + max(0.0, seconds))


def note_wait(req: Request, reason: WaitReason, now: float) -> None:
    """Until now it waited outside the queue, for this reason alone since it came or since its last wait ended."""
    add(req, reason, 0, now - came(req))


def came(req: Request) -> float:
    """When a request that has not run yet began to wait for what its account does not show."""
    return req.arrival + sum(waited.seconds for waited in req.waited.values())


class Overtakings:
    """How many later arrivals were admitted before a request; counts no further than `MOST_OVERTAKINGS`."""

    def __init__(self) -> None:
        self.arrive = count().__next__  # the number of a new arrival
        self._admitted = array("q")  # arrival numbers, ascending; most are added near the end

    def leave(self, number: int, is_admitted: bool) -> int:
        """An arrival leaves the queue for the first time; how many later ones were admitted before it."""
        at = bisect_left(self._admitted, number)
        num_later = min(len(self._admitted) - at, MOST_OVERTAKINGS)
        if is_admitted:
            self._admitted.insert(at, number)
            if len(self._admitted) > 2 * MOST_OVERTAKINGS:
                del self._admitted[:MOST_OVERTAKINGS]
        return num_later
