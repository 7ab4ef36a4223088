"""Suspects of engines that joined: how such an engine ended is not seen from here; all that it held may have done it.

    first crash     all that it held are suspects; they go on elsewhere together
    second crash    those of them that made no progress are candidates: no engine has more than half of them at a time
    next crash      the candidates that it held are left, and no engine has more than half of those
    one is left     it fails, if it was alone or was in so many crashes in a row that chance is no explanation

So a request that ends engines ends as many as with `engine.suspects`, where one half waits for the other since there is
one engine. Here the halves run at once on several, and a half waits only where there is no other. Requests that were in
no crash run as ever. Suspects wait a moment after each crash beyond the first, since engines of one machine or rack end
together: what went from one of those to the next would seem to have ended them all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from headway.engine.journal import OpenRequest
from headway.engine.suspects import Suspects

QUIET_S = 0.2  # after a crash beyond the first: engines that end for the same reason have done so by then
_CERTAIN = 3  # crashes in a row that a request was in, before it got a token


class Ward(Suspects):
    """One for all engines that joined; `on_change` is called when requests may run that might not before.

    The groups are disjoint: a member of each ended an engine that all of them were with.
    """

    def __init__(self, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._on_change = on_change
        self._clock = clock
        self._last = -math.inf  # a crash
        self._is_quiet = False
        self._of: dict[int, _Group] = {}  # by candidate

    @property
    def is_halving(self) -> bool:
        """No engine stops taking requests for it: only suspects wait."""
        return False

    def admits(self, id: int) -> bool:
        """Whether an engine that has no other candidate may have this request now."""
        return not (self._is_quiet and id in self)

    def has_room(self, id: int, beside: Iterable[int]) -> bool:
        """Whether an engine that has these others may have this one too."""
        group = self._of.get(id)
        return self.admits(id) and (group is None or len(group.ids.intersection(beside)) < group.most)

    def look(self) -> None:
        """Time has passed: suspects may run again."""
        if self._is_quiet and self._clock() >= self._last + QUIET_S:
            self._is_quiet = False
            self._on_change()

    def lost(self, held: Mapping[int, OpenRequest]) -> int | None:
        """An engine that held these ended; the request that is to blame, if that is certain."""
        now = self._clock()
        is_soon, self._last = now < self._last + QUIET_S, now
        again = {id for id in held if id in self}
        for id in held:
            self.add(id)
        if not again:
            return None
        self._is_quiet = True
        hit = {group for each in again if (group := self._of.get(each)) is not None}
        for group in hit:
            self._narrow(group, group.ids & again)
        is_new = not hit  # else a candidate explains it: what was beside is suspected as after a first crash
        if is_new:
            self._narrow(_Group(), again)
        for each in again:
            if each in self._of and len(self._of[each].ids) == 1:
                is_alone = len(held) == 1 and not is_soon
                if is_alone or (not is_new and held[each].num_barren >= _CERTAIN):
                    self.ended(each)
                    return each
        return None

    def _narrow(self, group: _Group, ids: set[int]) -> None:
        for each in group.ids - ids:
            del self._of[each]
        group.ids, group.most = ids, (len(ids) + 1) // 2
        for each in ids:
            self._of[each] = group

    def cleared(self, id: int) -> bool:
        return self.ended(id)

    def ended(self, id: int) -> bool:
        """It is over, or harmless. What waited for it may be with any engine: False, and `on_change` is called."""
        super().ended(id)
        group = self._of.pop(id, None)
        if group is not None:
            group.ids.discard(id)
            if len(group.ids) >= group.most:
                self._on_change()
        return False


@dataclass(eq=False, slots=True)
class _Group:
    """Candidates, and how many of them one engine may have at a time."""

    ids: set[int] = field(default_factory=set)
    most: int = 0
