"""Suspects of engines that joined: how such an engine ended is not seen from here; all that it held may have done it.

The rule is that of `engine.suspects`, over all engines that joined: after a first crash what was held goes on elsewhere
together; what has made no progress when a second one crashes goes on in halves, one after the other. Requests that were
in no crash run as ever. Suspects wait a moment after each crash beyond the first, since engines of one machine or rack
end together: what went from one of those to the next would seem to have ended them all. A request that is the last of
its half fails if it was alone, or if it was in so many crashes in a row, without a token between, that chance is no
explanation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from headway.engine.journal import OpenRequest
from headway.engine.suspects import Suspects

QUIET_S = 0.2  # after a crash beyond the first: engines that end for the same reason have done so by then
_CERTAIN = 3  # crashes in a row that a request was in, before it got a token


class Ward(Suspects):
    """One for all engines that joined; `on_change` is called when requests may run that might not before."""

    def __init__(self, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._on_change = on_change
        self._clock = clock
        self._quiet_until: float | None = None

    @property
    def is_halving(self) -> bool:
        """No engine stops taking requests for it: only suspects wait."""
        return False

    def admits(self, id: int) -> bool:
        return id not in self or (self._quiet_until is None and super().admits(id))

    def look(self) -> None:
        """Time has passed: suspects may run again."""
        if self._quiet_until is not None and self._clock() >= self._quiet_until:
            self._quiet_until = None
            self._on_change()

    def lost(self, held: Mapping[int, OpenRequest]) -> int | None:
        """An engine that held these ended; the request that is to blame, if that is certain."""
        blamed = super().crashed(sorted(held))
        if self._groups:
            self._quiet_until = self._clock() + QUIET_S
        if blamed is None and len(self._groups) > 0 and len(self._groups[0]) == 1:
            (last,) = self._groups[0]
            if last in held and held[last].num_barren >= _CERTAIN:
                self.ended(last)
                return last
        return blamed

    def cleared(self, id: int) -> bool:
        self._tell(super().cleared(id))
        return False

    def ended(self, id: int) -> bool:
        self._tell(super().ended(id))
        return False

    def _tell(self, has_changed: bool) -> None:
        if has_changed:
            self._on_change()
