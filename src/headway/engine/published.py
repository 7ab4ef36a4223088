"""What the engine publishes after its steps: how long a request that came now would wait, by lane.

The API process refuses by it at once, without asking the engine, which may be in the middle of a long step.

    wait = sum of what the waiting requests before it will cost the engine, over the share of their lane

While every slot is taken the engine works off one second of cost in a second, whatever it is spent on. Costs are those
of the learned cost model at expected lengths; the ratio of real to predicted waits, kept as a slow average, corrects
what both leave out. Answers of one request beyond its share of the slots are left out: others go before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.control.forecast import Backlog
from headway.core.queue import Key
from headway.core.request import Request
from headway.core.scheduler import Scheduler

EVERY_S = 0.005
_SPEED = 0.05  # weight of the newest wait
_LEAST_S = 0.25  # a shorter wait says nothing about the ratio
_MOST = 4.0  # times that real waits may be longer or shorter than predicted


@dataclass(frozen=True, slots=True)
class Published:
    """Numbers of one moment; they include every request up to `last_id`."""

    last_id: int = 0
    num_free: int = 0  # slots that a request that comes now would find; 0 while others wait
    num_waiting: int = 0
    max_waiting: int = 1 << 30
    each_s: float = 0.0  # what one more waiting request adds to the wait of the next
    waits: Mapping[str, float] = field(default_factory=dict)  # by lane, seconds; "" where there are no lanes
    sheds: bool = False  # the policy ends requests whose objective is out of reach
    num_excess: int = 0  # of those that wait: answers of large requests, which others go before
    group_cap: int = 1 << 30  # answers of one request beyond so many are such


class _Place:
    """Where a request waits: of which lane and group, since when, and what was predicted."""

    __slots__ = ("group", "lane", "num_output", "num_prompt", "predicted", "since")

    def __init__(self, req: Request, since: float, predicted: float) -> None:
        self.lane, self.group = req.lane, req.group
        self.num_prompt, self.num_output = len(req.tokens), req.likely_output - req.num_output
        self.since, self.predicted = since, predicted


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
        self._now = 0.0
        self._log_ratio = 0.0  # of real to predicted waits
        self._each: float | None = None  # engine seconds of one request, as last asked for

    def push(self, req: Request, key: Key) -> None:
        super().push(req, key)
        if req.id in self._places:
            return
        place = self._places[req.id] = _Place(req, max(self._now, req.arrival), self.raw_wait(req.lane))
        self._lane(place).add(place, 1)
        if place.group:
            self._count(place, 1)

    def remove(self, id: int, is_admitted: bool = False) -> None:
        super().remove(id, is_admitted)
        place = self._places.pop(id, None)
        if place is None:
            return
        if place.group:
            self._count(place, -1)
        self._lane(place).add(place, -1)
        waited = self._now - place.since
        if is_admitted and max(waited, place.predicted) > _LEAST_S and place.predicted > 0:
            ratio = math.log(max(waited, 1e-3) / place.predicted)
            bound = math.log(_MOST)
            self._log_ratio += _SPEED * (min(bound, max(-bound, ratio)) - self._log_ratio)

    def begin(self, now: float) -> None:
        super().begin(now)
        self._now = now

    def measure(self, scheduler: Scheduler) -> None:
        """Learn what a request costs now: the mean of those that wait, while any do."""
        costs = scheduler.state.costs
        if not costs.is_ready:
            return
        count = sum(lane.count for lane in self._lanes.values())
        if count:
            num_prompt = max(1, round(sum(lane.num_prompt for lane in self._lanes.values()) / count))
            num_output = sum(lane.num_output for lane in self._lanes.values()) / count
            self._each = costs.prefill(num_prompt) + costs.decode(num_prompt, num_output)

    @property
    def each_s(self) -> float:
        """Seconds that one more waiting request adds to the wait."""
        return (self._each or 0.0) * math.exp(self._log_ratio)

    def wait(self, lane: str) -> float:
        """Seconds that a request of this lane would wait if it came now."""
        return self.raw_wait(lane) * math.exp(self._log_ratio)

    def raw_wait(self, lane: str) -> float:
        """Likewise, as costs alone say."""
        name = lane if lane in self._lanes else next(iter(self._lanes))
        busy = [each for each, known in self._lanes.items() if known.count or each == name]
        share = self._shares.get(name, 1.0) / sum(self._shares.get(each, 1.0) for each in busy)
        known = self._lanes[name]
        return (known.count - known.excess) * (self._each or 0.0) / share

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
        return self._lanes.get(place.lane) or next(iter(self._lanes.values()))

    def _count(self, place: _Place, sign: int) -> None:
        """Keep `excess`: by how many the groups of a lane are above what counts of each."""
        before = self._groups.get(place.group, 0)
        after = before + sign
        if after:
            self._groups[place.group] = after
        else:
            del self._groups[place.group]
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
            0 if num_waiting else scheduler.state.num_slots,
            num_waiting,
            max_waiting,
            backlog.each_s,
            {lane: backlog.wait(lane) for lane in backlog.lanes},
            self._sheds,
            num_waiting - min(num_waiting, backlog.num_counted),
            backlog.group_cap,
        )
        self._at = now
        if found == self._last:
            return None
        self._last = found
        return found
