"""How many replicas a simulated fleet is to have: the rule of service, held for a while before it is followed.

Ray Serve asks `engines_needed` again and again, and follows it when it has wanted more (or fewer) for a whole delay; so
does this. What is lost is started again, as the number that is wanted has not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.cluster.scaling import ClusterLoad, ScaleRule, engines_needed
from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScaleSetup:
    """Bounds, the rule, and for how long it has to say so."""

    least: int
    most: int
    rule: ScaleRule
    up_s: float = 2.0
    down_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"scale is {self.least}:{self.most}; allowed: from 1 up, the smaller number first")
        values = (self.rule.requests or 1.0, self.rule.wait_s)
        if not (all(0 < value < 1e9 for value in values) and 0 <= min(self.up_s, self.down_s) < 1e9):
            rule, delays = self.rule, f"{self.up_s:g} and {self.down_s:g}"
            got = f"per-replica {rule.requests}, wait-s {rule.wait_s:g}, delays {delays}"
            raise ConfigError(f"{got}; allowed: numbers above 0, delays of 0 or more")


class HeldTarget:
    """`number` changes only when the rule has wanted more, or fewer, at every look of its delay."""

    def __init__(self, setup: ScaleSetup, number: int) -> None:
        self.number = number
        self._setup = setup
        self._since: dict[bool, float] = {}  # wants more (True) or fewer: since when

    def look(self, now: float, load: ClusterLoad) -> int:
        setup = self._setup
        wanted = max(setup.least, min(setup.most, engines_needed(load, self.number, setup.rule)))
        if wanted == self.number:
            self._since.clear()
            return self.number
        is_more = wanted > self.number
        since = self._since.get(is_more, now)
        self._since = {is_more: since}
        if now - since >= (setup.up_s if is_more else setup.down_s):
            self.number = wanted
            self._since.clear()
        return self.number


def add_up(loads: Sequence[ClusterLoad], num_more: int) -> ClusterLoad:
    """The load of all cells, with so many requests that wait outside; the wait is the mean over their engines."""
    engines = sum(each.num_engines for each in loads)
    waits = sum(each.wait_s * each.num_engines for each in loads)
    return ClusterLoad(
        num_requests=num_more + sum(each.num_requests for each in loads),
        wait_s=waits / engines if engines else 0.0,
        num_engines=engines,
        num_slots=min((each.num_slots for each in loads if each.num_slots), default=0),
    )
