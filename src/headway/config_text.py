"""Configuration fields that hold several values in one text, such as ann=2,bob=1, and how their faults are told."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SettingKind:
    """Which values a setting takes; those of a number are finite, at least `least`, and above it if `is_open`."""

    types: tuple[type, ...]
    words: str
    takes_null: bool = False
    least: float = -math.inf
    is_open: bool = False
    most: float = math.inf

    def check(self, name: str, value: bool | int | float | str | None) -> None:
        """ConfigError if the setting of this name does not take this value."""
        if value is None:
            fits = self.takes_null
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_above = value > self.least or (value == self.least and not self.is_open)
            fits = isinstance(value, self.types) and abs(value) < _TOO_MUCH and is_above and value <= self.most
        else:
            fits = isinstance(value, str) and str in self.types
        require(fits, name, value, self.words)


_TOO_MUCH = 1e300  # of a number; whole ones beyond that are no floats any more


def parse_shares(text: str, name: str) -> dict[str, float]:
    """The shares in a text like ann=2,bob=1, in its order."""
    shares: dict[str, float] = {}
    for part in text.split(",") if text else ():
        key, _, value = (piece.strip() for piece in part.partition("="))
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        require(bool(key) and 0 < share < 1e9, name, text, "names with shares above 0, such as ann=2,bob=1")
        shares[key] = share
    return shares


def parse_options(text: str, name: str) -> dict[str, float | int | str | None]:
    """The values in a text like beta=20,mode=x: numbers where they look like numbers, None for null."""
    options: dict[str, float | int | str | None] = {}
    for part in text.split(",") if text else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        require(key.isidentifier() and bool(equals), name, text, "name=value, several of them with commas")
        options[key] = None if value == "null" else _number(value)
    return options


class Batching(NamedTuple):
    """When requests are admitted: at every step (continuous), or in batches (the baselines)."""

    kind: str
    size: int
    window_ms: float = 0.0  # how long the oldest of a batch that is not full waits for others
    has_buckets: bool = False  # a batch takes requests of about the oldest's expected answer length


_BATCHES = re.compile(
    r"(?P<static>static)(:(?P<batch>[1-9]\d{0,5}))?"
    r"|(?P<dynamic>dynamic)(:(?P<size>[1-9]\d{0,5}))?(,window=(?P<window>\d{1,8}(\.\d{1,8})?))?(?P<buckets>,buckets)?",
    re.ASCII,
)


def parse_batching(text: str) -> Batching:
    """What a text like dynamic:8,window=50,buckets asks for; a size or window left out is that one's."""
    if text in ("continuous", "naive"):
        return Batching(text, size=1)
    found = _BATCHES.fullmatch(text)
    if found is None:
        allowed = "continuous, naive, static:8, dynamic:8 or dynamic:8,window=50,buckets"
        raise ConfigError(f"batching is {text!r}; allowed: {allowed}, with a batch of 1 or more and a window in ms")
    if found["static"]:
        return Batching("static", int(found["batch"] or 8))
    return Batching("dynamic", int(found["size"] or 8), float(found["window"] or 50), bool(found["buckets"]))


class AdapterSource(NamedTuple):
    """Where an adapter lies; with a digest only what has that one is meant."""

    name: str
    path: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.name}{'@' * bool(self.digest)}{self.digest}={self.path}"


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,127}", re.ASCII)
_ADAPTER = re.compile(rf"(?P<name>{ADAPTER_NAME.pattern})(@(?P<digest>[0-9a-f]{{64}}))?=(?P<path>[^\0]+)", re.ASCII)


def parse_adapters(texts: Sequence[str]) -> list[AdapterSource]:
    """What texts like sql=./sql-lora name; each name once."""
    found: dict[str, AdapterSource] = {}
    for text in texts:
        fields = _ADAPTER.fullmatch(text)
        if fields is None or fields["name"] in found:
            allowed = "NAME=PATH, NAME of letters, digits, _, ., / and -, and each name once"
            raise ConfigError(f"adapter is {text!r}; allowed: {allowed}")
        found[fields["name"]] = AdapterSource(fields["name"], fields["path"], fields["digest"] or "")
    return list(found.values())


def require(ok: bool, name: str, got: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {got!r}; allowed: {allowed}")


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
