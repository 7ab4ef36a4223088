"""What the engine publishes after its steps: how long a request that came now would wait, by lane.

The API process refuses by it at once, without asking the engine, which may be in the middle of a long step.

    wait = sum of what the waiting requests before it will cost the engine, over the share of their lane

While every slot is taken the engine works off one second of cost in a second, whatever it is spent on. Requests for
which a slot is free wait for the prompts before them and for no answer. Costs are those of the learned cost model at
expected lengths, in a batch as large as was seen lately or would be now. What both leave out is corrected by the recent
pace: seconds in which requests waited for others to end, over the cost of those that were admitted in them. Answers of
one request beyond its share of the slots are left out: others go before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.control.forecast import Backlog
from headway.core.queue import Key
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.values.states import WaitReason

EVERY_S = 0.005
_MEMORY = 60.0  # seconds of waiting after which an admission counts for a third
_PRIOR_S = 10.0  # of waiting for which costs are believed
_LASTING = 0.998  # of the largest batch is left at the next look
_BRIEF = (None, WaitReason.TOKENS, WaitReason.PREFIX)  # what is waited for although a slot is free and may be had
_FULL = (WaitReason.SLOTS, WaitReason.BLOCKS, WaitReason.PACING)  # others have to end
_MOST = 4.0  # times that real waits may be longer or shorter than costs say


@dataclass(frozen=True, slots=True)
class Published:
    """Numbers of one moment; they include every request up to `last_id`."""

    last_id: int = 0
    num_free: int = 0  # slots that are left when all that wait have theirs
    num_waiting: int = 0
    max_waiting: int = 1 << 30
    each_s: float = 0.0  # what one more waiting request adds to the wait of the next
    waits: Mapping[str, float] = field(default_factory=dict)  # by lane, seconds; "" where there are no lanes
    sheds: bool = False  # the policy ends requests whose objective is out of reach
    num_excess: int = 0  # of those that wait: answers of large requests, which others go before
    group_cap: int = 1 << 30  # answers of one request beyond so many are such
    most_answers: int = 1 << 30  # that one request may ask for, where fewer than `max_waiting` wait at one place
    num_running: int = 0
    num_prefill: int = 0  # prompt tokens to compute, of waiting requests and of those under way


class _Place:
    """A waiting request and what it will cost, as was expected when it came."""

    __slots__ = ("num_output", "num_prompt", "req")

    def __init__(self, req: Request, num_prompt: int) -> None:
        self.req, self.num_prompt = req, num_prompt
        self.num_output = req.likely_output - req.num_output


class _LaneSum:
    __slots__ = ("count", "excess", "num_output", "num_prompt")

    def __init__(self) -> None:
        self.count = self.excess = self.num_prompt = 0
        self.num_output = 0.0

    def add(self, place: _Place, sign: int) -> None:
        self.count += sign
        self.num_prompt += sign * place.num_prompt
        self.num_output += sign * place.num_output


class LaneBacklog(Backlog):
    """A backlog that also knows what the waiting requests of each lane will cost. O(1) for each that comes or goes."""

    def __init__(self, shares: Mapping[str, float] | None = None, group_cap: int = 1 << 30) -> None:
        super().__init__()
        self._shares = dict(shares or {})
        self.group_cap = group_cap
        self._places: dict[int, _Place] = {}
        self._lanes: dict[str, _LaneSum] = {lane: _LaneSum() for lane in self._shares or ("",)}
        self._groups: dict[int, int] = {}
        self._each = 0.0  # engine seconds of one request, as last asked for
        self._prompt = 0.0  # of these, what its prompt takes
        self._num_output = 1.0  # tokens of one, as they were expected
        self._most_rows = 0.0  # in a batch of late
        self._is_full = False  # requests wait for others to end
        self._full_s = self._worked_s = 0.0  # seconds of such waiting, and cost of what was admitted then; both decay
        self.num_free = 0  # slots that waiting requests will be given without anyone ending

    def push(self, req: Request, key: Key) -> None:
        super().push(req, key)
        self._add_place(req, len(req.tokens))

    def follow(self, req: Request) -> None:
        self._add_place(req, 0)

    def _add_place(self, req: Request, num_prompt: int) -> None:
        if req.id in self._places:
            return
        place = self._places[req.id] = _Place(req, num_prompt)
        self._lane(place).add(place, 1)
        if place.req.group:
            self._count(place, 1)

    def remove(self, id: int, is_admitted: bool = False) -> None:
        super().remove(id, is_admitted)
        place = self._places.pop(id, None)
        if place is None:
            return
        if place.req.group:
            self._count(place, -1)
        self._lane(place).add(place, -1)
        if is_admitted and self._is_full:
            self._worked_s += self._prompt + (self._each - self._prompt) * place.num_output / self._num_output

    def begin(self, now: float) -> None:
        if self._since is not None and self._is_full:
            kept = math.exp(-(now - self._since) / _MEMORY)
            self._full_s = self._full_s * kept + now - self._since
            self._worked_s *= kept
        super().begin(now)

    def measure(self, scheduler: Scheduler) -> None:
        """Learn what a request costs now: the mean of those that wait, while any do."""
        state = scheduler.state
        costs, count = state.costs, sum(lane.count for lane in self._lanes.values())
        self.num_free = state.num_slots if not count or state.waiting.waits.reason in _BRIEF else 0
        self._is_full = count > 0 and state.waiting.waits.reason in _FULL
        self._most_rows = max(float(state.num_running), _LASTING * self._most_rows)
        if count and costs.is_ready:
            num_prompt = max(1, round(sum(lane.num_prompt for lane in self._lanes.values()) / count))
            num_output = self._num_output = sum(lane.num_output for lane in self._lanes.values()) / count
            # Before the first answers all that is known is what requests declare, which says little. A ceiling is a
            # guess then, and of now, whereas lengths were expected when requests came.
            num_output = min(num_output, state.ceiling_of(next(reversed(self._places.values())).req))
            num_rows = max(state.num_running + min(self.num_free, count), self._most_rows)
            self._prompt = costs.prefill(num_prompt)
            self._each = self._prompt + costs.decode(num_prompt, num_output, num_rows)

    @property
    def each_s(self) -> float:
        """Seconds that one more waiting request adds to the wait."""
        return self._each * self.ratio

    @property
    def ratio(self) -> float:
        """Of real to predicted waits, as was seen lately."""
        return min(_MOST, max(1 / _MOST, (self._full_s + _PRIOR_S) / (self._worked_s + _PRIOR_S)))

    def wait(self, lane: str) -> float:
        """Seconds that a request of this lane would wait if it came now."""
        return self.raw_wait(lane) * self.ratio

    def raw_wait(self, lane: str) -> float:
        """Likewise, as costs alone say."""
        name = lane if lane in self._lanes else next(iter(self._lanes))
        busy = [each for each, known in self._lanes.items() if known.count or each == name]
        share = self._shares.get(name, 1.0) / sum(self._shares.get(each, 1.0) for each in busy)
        known = self._lanes[name]
        count = (known.count - known.excess) / share
        num_free = min(count, self.num_free)
        return num_free * self._prompt + (count - num_free) * self._each

    @property
    def num_counted(self) -> int:
        """Waiting requests without those that others go before."""
        return sum(lane.count - lane.excess for lane in self._lanes.values())

    def takes(self, group: int, max_waiting: int) -> bool:
        """True if one more of this group may wait although `max_waiting` do: it is small, and large ones fill it."""
        return self._groups.get(group, 0) < self.group_cap and self.num_counted < max_waiting

    @property
    def lanes(self) -> list[str]:
        return list(self._lanes)

    def _lane(self, place: _Place) -> _LaneSum:
        return self._lanes.get(place.req.lane) or next(iter(self._lanes.values()))

    def _count(self, place: _Place, sign: int) -> None:
        """Keep `excess`: by how many the groups of a lane are above what counts of each."""
        before = self._groups.get(place.req.group, 0)
        after = before + sign
        if after:
            self._groups[place.req.group] = after
        else:
            del self._groups[place.req.group]
        self._lane(place).excess += max(0, after - self.group_cap) - max(0, before - self.group_cap)


class Publisher:
    """Says what is new, at most every `EVERY_S` seconds, and always before the engine has nothing to do."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last = Published()
        self._at = -math.inf
        self._sheds = scheduler.state.policy.overrides("latest_start")

    def takes(self, group: int, max_waiting: int) -> bool:
        """As the backlog says; False where there is none that knows."""
        backlog = self._scheduler.state.waiting.observer
        return isinstance(backlog, LaneBacklog) and backlog.takes(group, max_waiting)

    def news(self, now: float, last_id: int, max_waiting: int) -> Published | None:
        """What is to be published now; None if it is nothing new or too soon."""
        scheduler = self._scheduler
        backlog = scheduler.state.waiting.observer
        if not isinstance(backlog, LaneBacklog) or (scheduler.has_work and now - self._at < EVERY_S):
            return None
        backlog.measure(scheduler)
        num_waiting = scheduler.num_waiting
        found = Published(
            last_id,
            max(0, backlog.num_free - num_waiting),
            num_waiting,
            max_waiting,
            backlog.each_s,
            {lane: backlog.wait(lane) for lane in backlog.lanes},
            self._sheds,
            num_waiting - min(num_waiting, backlog.num_counted),
            backlog.group_cap,
            num_running=scheduler.num_running,
            num_prefill=backlog.total + scheduler.state.rows.num_wanted,
        )
        self._at = now
        if found == self._last:
            return None
        self._last = found
        return found
