"""Requests to simulate: from a trace file as it is published, or made up by a seed.

A prompt is a list of blocks of `BLOCK` tokens: equal numbers in front are a shared prefix. This file knows no engine.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from headway.errors import ConfigError

BLOCK = 512
SHAPES = ("steady", "diurnal", "bursty")
_UNIQUE = 1 << 30  # block numbers from here on occur in one prompt alone
_PER_PROMPT = 1 << 10  # of them, for each prompt
_MOST_PREFIXES = _UNIQUE // _PER_PROMPT
_SWING = 0.8  # of the mean rate: a diurnal load is between a fifth and nine fifths of it
_BURST, _BURST_SHARE = 4.0, 0.15  # a burst has so many times the rate between bursts, for this share of the time


@dataclass(frozen=True, slots=True)
class TraceArrival:
    """A request of a trace: its prompt is these blocks, the last of which may be shorter."""

    at: float
    blocks: Sequence[int]
    num_prompt: int
    num_output: int

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for block in self.blocks:
            tokens += [block] * min(BLOCK, self.num_prompt - len(tokens))
        return tokens


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Half of a prompt is one of `num_prefixes`, the popular ones by a power law; with 0 all prompts are unique."""

    count: int
    rate: float  # per second, the mean
    seed: int = 0
    num_prefixes: int = 0
    skew: float = 1.1
    num_prompt: int = 4096
    shape: str = "steady"
    period_s: float = 600.0  # of a diurnal load; mean time between bursts

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"the shape of the load is {self.shape!r}; allowed: {', '.join(SHAPES)}")
        if not (0 < self.rate < math.inf and 0 < self.period_s < math.inf and self.count > 0):
            got = f"{self.count} requests at {self.rate:g} per second, period {self.period_s:g} s"
            raise ConfigError(f"{got}; allowed: numbers above 0")
        if not (1 <= self.num_prompt <= _PER_PROMPT * BLOCK and 0 <= self.num_prefixes <= _MOST_PREFIXES):
            got = f"{self.num_prompt} tokens in each prompt, {self.num_prefixes} prefixes"
            raise ConfigError(f"{got}; allowed: 1 to {_PER_PROMPT * BLOCK}, 0 to {_MOST_PREFIXES}")

    def arrivals(self) -> Iterator[TraceArrival]:
        """Poisson arrivals at the rate of the moment."""
        rng = random.Random(self.seed)
        weights = [1 / (rank + 1) ** self.skew for rank in range(self.num_prefixes)]
        rate_at, most = self._rates(random.Random(self.seed + 1))
        now = 0.0
        for number in range(self.count):
            now += rng.expovariate(most)
            while rng.random() * most > rate_at(now):
                now += rng.expovariate(most)
            blocks = [_UNIQUE + _PER_PROMPT * number + at for at in range(-(-self.num_prompt // BLOCK))]
            if self.num_prefixes:
                prefix = rng.choices(range(self.num_prefixes), weights)[0]
                half = len(blocks) // 2
                blocks[:half] = [prefix * _PER_PROMPT + at for at in range(half)]
            yield TraceArrival(now, blocks, self.num_prompt, rng.randint(50, 350))

    def _rates(self, rng: random.Random) -> tuple[Callable[[float], float], float]:
        """The rate at a time, and the largest."""
        if self.shape == "diurnal":  # begins at its lowest
            swing = 2 * math.pi / self.period_s
            return lambda now: self.rate * (1 - _SWING * math.cos(swing * now)), self.rate * (1 + _SWING)
        if self.shape == "bursty":
            low = self.rate / (1 + (_BURST - 1) * _BURST_SHARE)
            bursts = _Bursts(rng, self.period_s)
            return lambda now: low * (_BURST if bursts.is_on(now) else 1.0), low * _BURST
        return lambda now: self.rate, self.rate


class _Bursts:
    """On and off in turn, for times that are drawn; times that are asked about never fall."""

    def __init__(self, rng: random.Random, period_s: float) -> None:
        self._rng = rng
        self._means = ((1 - _BURST_SHARE) * period_s, _BURST_SHARE * period_s)
        self._is_on = False
        self._until = rng.expovariate(1 / self._means[0])

    def is_on(self, now: float) -> bool:
        while now >= self._until:
            self._is_on = not self._is_on
            self._until += self._rng.expovariate(1 / self._means[self._is_on])
        return self._is_on


_LATEST_S = 1e7


def read_trace(path: Path, speed: float = 1.0, most: int | None = None) -> Iterator[TraceArrival]:
    """A trace: lines of JSON with block hashes (Mooncake), or a table of times and lengths (Azure)."""
    if not 0 < speed < math.inf:
        raise ConfigError(f"the speed of a trace is {speed:g}; allowed: a number above 0")
    try:
        with path.open(encoding="utf-8") as file:
            read = _read_table if path.suffix == ".csv" else _read_lines
            yield from islice(read(path, file), most) if speed == 1 else _faster(islice(read(path, file), most), speed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error


def _faster(arrivals: Iterator[TraceArrival], speed: float) -> Iterator[TraceArrival]:
    for each in arrivals:
        yield TraceArrival(each.at / speed, each.blocks, each.num_prompt, each.num_output)


def _read_lines(path: Path, lines: Iterator[str]) -> Iterator[TraceArrival]:
    """timestamp in ms, input_length, output_length and hash_ids of 512-token blocks."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            blocks, num_prompt = [int(block) for block in entry["hash_ids"]], int(entry["input_length"])
            at, num_output = float(entry["timestamp"]) / 1e3, int(entry["output_length"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}, line {number} is no request of a trace: {error!r}") from error
        if num_prompt < 1 or num_output < 1 or not blocks:
            raise ConfigError(f"{path}, line {number} has no prompt or no answer")
        if not 0 <= at <= _LATEST_S:  # the clock goes on second by second
            what = f"comes at {at * 1e3:g} ms; allowed: 0 to {_LATEST_S * 1e3:g}"
            raise ConfigError(f"{path}, line {number} {what}")
        yield TraceArrival(at, blocks, num_prompt, num_output)


def _read_table(path: Path, lines: Iterator[str]) -> Iterator[TraceArrival]:
    """TIMESTAMP, ContextTokens, GeneratedTokens: nothing is known of prefixes, so that every prompt is its own."""
    began: datetime | None = None
    header = next(lines, "").strip()
    if header != "TIMESTAMP,ContextTokens,GeneratedTokens":
        raise ConfigError(f"{path} begins with {header[:60]!r}; allowed: TIMESTAMP,ContextTokens,GeneratedTokens")
    for number, line in enumerate(lines, 2):
        try:
            stamp, prompt, output = line.split(",")
            time = datetime.fromisoformat(stamp[:26])  # it has seven digits of a second
            num_prompt, num_output = int(prompt), int(output)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no request of a trace: {error}") from error
        if num_prompt < 1 or num_output < 1:
            raise ConfigError(f"{path}, line {number} has no prompt or no answer")
        began = began or time
        blocks = [_UNIQUE + _PER_PROMPT * number + at for at in range(-(-num_prompt // BLOCK))]
        yield TraceArrival((time - began).total_seconds(), blocks, num_prompt, num_output)
