"""Two brakes of a fleet: what to do with a replica that fails again and again, and how much may be tried twice.

    CLOSED ──several failures in a row──▶ OPEN ──pause──▶ HALF-OPEN: one request ──goes well──▶ CLOSED
                                           ▲                  └────────────────fails──────────┐
                                           └──────────────────── twice the pause ◀────────────┘

Pure: the clock is the caller's.
"""

from __future__ import annotations

_MOST_FAILURES = 3  # in a row
_PAUSE_S, _LONGEST_S = 1.0, 30.0
_SHARE = 0.2  # of the requests that came: so many may be tried once more
_MOST_SAVED = 10.0  # tries that a quiet time leaves for a busy one


class Breaker:
    """`admits` is True while the replica may have requests; in HALF-OPEN for one at a time."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = _PAUSE_S
        self._open_until: float | None = None
        self._probe: int | None = None

    @property
    def state(self) -> str:
        if self._open_until is None:
            return "closed"
        return "open" if self._probe is None else "half-open"

    def admits(self, now: float) -> bool:
        return self._open_until is None or (self._probe is None and now >= self._open_until)

    def sent(self, id: int, now: float) -> None:
        """A request was given to the replica."""
        if self._open_until is not None and self._probe is None and now >= self._open_until:
            self._probe = id

    def went_well(self, id: int) -> None:
        """A request ended there as it should."""
        if self._open_until is None:
            self._num_failures = 0
        elif id == self._probe:
            self._num_failures, self._pause_s, self._open_until, self._probe = 0, _PAUSE_S, None, None

    def left(self, id: int) -> None:
        """A request left without saying anything about the replica: its client did, or it was at fault."""
        if id == self._probe:
            self._probe = None

    def failed(self, now: float) -> None:
        """The replica ended or failed a request."""
        self._num_failures += 1
        if self._open_until is not None:
            if self._probe is not None or now >= self._open_until:
                self._pause_s = min(_LONGEST_S, 2 * self._pause_s)
                self._open_until, self._probe = now + self._pause_s, None
        elif self._num_failures >= _MOST_FAILURES:
            self._open_until = now + self._pause_s


class RetryBudget:
    """Tries beyond the first are at most a fifth of the requests that came, but for a few that were saved up."""

    def __init__(self) -> None:
        self._left = 0.0
        self.num_offered = 0
        self.num_attempts = 0

    def offered(self) -> None:
        """A request came: its first try."""
        self.num_offered += 1
        self.num_attempts += 1
        self._left = min(_MOST_SAVED, self._left + _SHARE)

    def spend(self) -> bool:
        """True if one more try is within the budget, which it then is charged for."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        self.num_attempts += 1
        return True

    def charge(self) -> None:
        """A try that has to be, since the request was accepted: there is less for others then."""
        self._left = max(-_MOST_SAVED, self._left - 1.0)
