"""How many replicas a fleet should have, from what its replicas say of their load. It starts and stops nothing.

    up      at once, to what the requests of now need, or in the ratio of the predicted wait to the allowed one
    down    to what the busiest moment of the last `hold_s` seconds needed, with room to spare

The gap between the two is the hysteresis: after growing, the same load does not shrink the fleet, and a short quiet
does not either. Replicas that start count as if they served, so that waiting for them orders no more of them. Pure
arithmetic over the load; the caller asks about once a second and does the rest.

    window = LoadWindow(limits.hold_s)
    wanted = target_replicas(window.note(now, load), limits)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from headway.errors import ConfigError

_MOST_GROWTH = 2.0  # times as many replicas as serve now, for a wait that is too long
_SPARE = 0.8  # a smaller fleet is filled to so much of `per_replica` at most
_QUIET = 0.5  # of the allowed wait: a fleet that waited longer lately gives up no replica


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """A moment of a fleet: sums over its replicas, with requests that were sent and are not acknowledged."""

    num_ready: int  # replicas that take requests
    num_starting: int  # that are ordered and do not yet
    num_running: int  # requests in a slot
    num_waiting: int  # requests without one, those that no replica has yet included
    wait_s: float = 0.0  # predicted for a request that came now, mean over the replicas that take requests
    most_open: int = 0  # running and waiting together at the busiest moment of late
    most_wait_s: float = 0.0  # likewise of `wait_s`

    @property
    def num_open(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """What a fleet is to keep to. `per_replica` is what one replica serves within its objectives: measure it."""

    least: int = 1
    most: int = 8
    per_replica: float = 32.0  # requests that run or wait
    wait_s: float = 1.0  # predicted wait that is allowed
    hold_s: float = 120.0  # a replica is given up after so long without need for it

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"{self.least} to {self.most} replicas; allowed: from 1 up, the smaller number first")
        for name in ("per_replica", "wait_s", "hold_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} of the autoscaler is {value}; allowed: a number above 0")


def target_replicas(load: FleetLoad, limits: ScaleLimits) -> int:
    """How many replicas there should be, those that start included; equal arguments give equal answers."""
    have = load.num_ready + load.num_starting
    wanted = math.ceil(load.num_open / limits.per_replica)
    if load.wait_s > limits.wait_s:
        growth = min(_MOST_GROWTH, load.wait_s / limits.wait_s)
        wanted = max(wanted, math.ceil(growth * load.num_ready))
    if wanted < have:
        wanted = min(have, max(wanted, _needed_of_late(load, limits, have)))
    return max(limits.least, min(limits.most, wanted))


def _needed_of_late(load: FleetLoad, limits: ScaleLimits, have: int) -> int:
    if max(load.wait_s, load.most_wait_s) > _QUIET * limits.wait_s:
        return have
    return math.ceil(max(load.num_open, load.most_open) / (_SPARE * limits.per_replica))


class LoadWindow:
    """The busiest moment of the last seconds; a fleet that was not watched for so long is not known to be quiet."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: deque[tuple[float, float]] = deque()  # time, value: falling values, the largest first
        self._wait: deque[tuple[float, float]] = deque()
        self._began: float | None = None

    def note(self, now: float, load: FleetLoad) -> FleetLoad:
        """This load, with the busiest moment that came before it. Times never fall."""
        if self._began is None:
            self._began = now
        most_open = self._most(self._open, now, load.num_open)
        most_wait_s = self._most(self._wait, now, load.wait_s)
        if now - self._began < self._seconds:
            most_wait_s = math.inf
        return replace(load, most_open=int(most_open), most_wait_s=most_wait_s)

    def _most(self, kept: deque[tuple[float, float]], now: float, value: float) -> float:
        while kept and kept[-1][1] <= value:
            kept.pop()
        kept.append((now, value))
        while kept[0][0] < now - self._seconds:
            kept.popleft()
        return kept[0][1]
