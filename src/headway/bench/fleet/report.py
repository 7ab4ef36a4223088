"""What came of a simulated fleet: requests, caches, balance, losses, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from headway.values.params import NO_SLO, Slo

_MOMENTS = 48  # of a timeline that is printed
_SETTLED = 1.5  # times the usual TTFT: above it a fleet has not recovered
_BINS_S = 1.0


@dataclass(slots=True)
class Served:
    """A request as its client sees it; times are not numbers until they are there."""

    at: float
    num_prompt: int
    num_output: int = 0
    first: float = math.nan
    ended: float = math.nan
    stalled: float = math.nan  # since when its engine is gone, until the next token
    num_retries: int = 0  # beyond the first
    is_answered: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def tpot(self) -> float:
        return (self.ended - self.first) / max(1, self.num_output - 1)

    def meets(self, slo: Slo) -> bool:
        return (
            self.is_answered
            and (slo.ttft is None or self.ttft <= slo.ttft)
            and (slo.itl is None or self.tpot <= slo.itl)
            and (slo.deadline is None or self.ended - self.at <= slo.deadline)
        )


class LoadMoment(NamedTuple):
    """What the autoscaler saw."""

    at: float
    num_ready: int
    num_starting: int
    num_open: int
    wait_s: float


@dataclass(slots=True)
class FleetReport:
    """Counts and times of one run."""

    served: list[Served] = field(default_factory=list)  # in the order of their ends
    num_cached: int = 0
    num_repeated: int = 0  # requests of which some engine held a first block when they were routed
    num_reached: int = 0  # of these: sent to an engine that held it
    num_quiet: int = 0  # requests that came to an idle engine all of whose news had arrived
    num_wrong: int = 0  # of these: not as many cached tokens as the route expected
    num_refused: int = 0  # tries that found no room or no engine; their clients came again
    num_offered: int = 0  # tries of clients
    num_attempts: int = 0  # and those of fronts that tried another engine
    num_resumed: int = 0  # requests that went on in another engine
    pauses: list[float] = field(default_factory=list)  # seconds without a token, of answers that went on elsewhere
    losses: list[float] = field(default_factory=list)  # times
    busy: list[float] = field(default_factory=list)  # share of its time in steps, by engine that lives at the end
    by_cell: list[float] = field(default_factory=list)  # seconds of steps
    index_sizes: list[int] = field(default_factory=list)  # keys, by cell
    num_from_tier: int = 0  # prompt tokens, of those that were cached
    num_from_peers: int = 0
    link_busy: float = 0.0  # share of its time of the busiest link or tier
    replica_s: float = 0.0  # from the order of each replica to its end
    makespan: float = 0.0
    timeline: list[LoadMoment] = field(default_factory=list)

    @property
    def num_moved(self) -> int:
        """Prompt tokens whose KV was fetched."""
        return self.num_from_tier + self.num_from_peers

    @property
    def num_lost(self) -> int:
        return sum(not each.is_answered for each in self.served)

    @property
    def hit_ratio(self) -> float:
        return self.num_cached / sum(each.num_prompt for each in self.served)

    @property
    def reached(self) -> float:
        return self.num_reached / max(1, self.num_repeated)

    @property
    def skew(self) -> float:
        """Busy share of the busiest engine over the mean of all."""
        return _skew(self.busy)

    @property
    def cell_skew(self) -> float:
        """Time in steps of the busiest cell over the mean of all."""
        return _skew(self.by_cell)

    def attainment(self, slo: Slo) -> float:
        return sum(each.meets(slo) for each in self.served) / len(self.served)

    @property
    def recovery_s(self) -> float:
        """From the last loss until requests that come are served as before it; 0: nothing was lost."""
        if not self.losses:
            return 0.0
        lost = self.losses[-1]
        before = sorted(each.ttft for each in self.served if each.at < self.losses[0])
        if not before:
            return math.nan
        usual = _SETTLED * before[int(0.9 * len(before))]
        late = [each.at - lost for each in self.served if each.at >= lost and not each.ttft <= usual]
        counts: dict[int, int] = {}
        for after in late:
            counts[int(after / _BINS_S)] = counts.get(int(after / _BINS_S), 0) + 1
        came: dict[int, int] = {}
        for each in self.served:
            if each.at >= lost:
                at = int((each.at - lost) / _BINS_S)
                came[at] = came.get(at, 0) + 1
        worse = [at for at, number in counts.items() if number > 0.2 * came[at]]  # a tenth is usual
        return (max(worse) + 1) * _BINS_S if worse else 0.0

    def row(self, slo: Slo = NO_SLO) -> dict[str, object]:
        """What is printed."""
        ttfts = sorted(each.ttft for each in self.served if each.is_answered)
        tpots = sorted(each.tpot for each in self.served if each.is_answered)
        row: dict[str, object] = {
            "requests": len(self.served),
            "lost": self.num_lost,
            "hit_ratio": round(self.hit_ratio, 4),
            "repeats_reached": round(self.reached, 4),
            "skew": round(self.skew, 3),
            "busy": round(fmean(self.busy), 3),
            "ttft_mean_s": round(fmean(ttfts), 4) if ttfts else None,
            "ttft_p99_s": _round(_quantile(ttfts, 0.99)),
            "tpot_p99_s": _round(_quantile(tpots, 0.99)),
            "quiet": self.num_quiet,
            "quiet_wrong": self.num_wrong,
        }
        if len(self.by_cell) > 1:
            row |= {"cells": len(self.by_cell), "cell_skew": round(self.cell_skew, 3)}
        if self.link_busy:
            num_prompt = sum(each.num_prompt for each in self.served)
            row |= {
                "from_tier": round(self.num_from_tier / num_prompt, 4),
                "from_peers": round(self.num_from_peers / num_prompt, 4),
                "busiest_link": round(self.link_busy, 3),
            }
        row["index_keys"] = max(self.index_sizes)
        if self.num_refused:
            row |= {"refused": self.num_refused}
        if self.losses:
            row |= {
                "resumed": self.num_resumed,
                "attempts": round(self.num_attempts / self.num_offered, 4),
                "longest_pause_s": _round(max(self.pauses, default=0.0)),
                "recovery_s": _round(self.recovery_s),
            }
        if slo != NO_SLO:
            row["attainment"] = round(self.attainment(slo), 4)
        return row | {"seconds": round(self.makespan, 2), "replica_hours": round(self.replica_s / 3600, 4)}

    def moments(self) -> list[LoadMoment]:
        """Some of the timeline, evenly spaced."""
        every = -(-len(self.timeline) // _MOMENTS) or 1
        return self.timeline[::every]


def _skew(seconds: Sequence[float]) -> float:
    return max(seconds) / fmean(seconds) if sum(seconds) else 1.0


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return ordered[int(q * (len(ordered) - 1))] if ordered else None


def _round(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 4)
