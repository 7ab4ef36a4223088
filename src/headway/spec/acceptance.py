"""How often guesses are right, by the kind of guess; learned from every guess, verified or not.

A kind is a number: where the guess comes from, and how many tokens before it matched. A request has a record of its
own, which begins with what its tenant and route have shown, as that begins with what all have. Old guesses are
forgotten.
"""

from __future__ import annotations

from headway.spec.suffix import LONGEST

OWN, PAST, MODEL = 0, LONGEST + 1, 2 * (LONGEST + 1)  # a kind: this, and the length of the match or the place
_NUM_KINDS = 3 * (LONGEST + 1)
_FIRST = {OWN: (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8), PAST: (0.0, 0.0, 0.15, 0.2, 0.3, 0.5, 0.7), MODEL: (0.75,)}
_WEIGHT = 6.0  # guesses that what is known from before counts for
_FORGET = 0.97  # of a kind, with every guess of it
_MOST = 1024  # records by tenant and route


def kind_of(source: int, length: int) -> int:
    """The kind of a guess of this source behind so many matching tokens."""
    return source + min(length, LONGEST)


def _expected(kind: int) -> float:
    source = max(source for source in _FIRST if source <= kind)
    first = _FIRST[source]
    return first[min(kind - source, len(first) - 1)]


class Acceptance:
    """A record; `rate` lies between 0 and 1."""

    __slots__ = ("_before", "_hits", "_trials")

    def __init__(self, before: Acceptance | None = None) -> None:
        self._before = before
        self._hits = [0.0] * _NUM_KINDS
        self._trials = [0.0] * _NUM_KINDS

    def rate(self, kind: int) -> float:
        """The share of guesses of this kind that are right, where those before them were."""
        known = _expected(kind) if self._before is None else self._before.rate(kind)
        return (self._hits[kind] + _WEIGHT * known) / (self._trials[kind] + _WEIGHT)

    def learn(self, kind: int, is_right: bool) -> None:
        """A guess was right or wrong: here, and in what the record began with."""
        self._hits[kind] = _FORGET * self._hits[kind] + is_right
        self._trials[kind] = _FORGET * self._trials[kind] + 1.0
        if self._before is not None:
            self._before.learn(kind, is_right)


class Acceptances:
    """Records by tenant and route; those not asked for longest go first."""

    def __init__(self) -> None:
        self._all = Acceptance()
        self._of: dict[tuple[str, str], Acceptance] = {}

    def of(self, tenant: str, route: str) -> Acceptance:
        """A record for a new request."""
        key = tenant, route
        record = self._of[key] = self._of.pop(key, Acceptance(self._all))
        if len(self._of) > _MOST:
            del self._of[next(iter(self._of))]
        return Acceptance(record)
