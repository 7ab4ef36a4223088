"""Which request kills engines: all that an engine held when it crashed are suspects, until they prove to be harmless.

    first crash     all that it held are suspects; they resume together
    second crash    those that have not made progress since resume in halves, one half after the other
    a half crashes  it is halved again
    one is left     it runs alone: the engine that crashes then was killed by it, and it is ended

A request that makes progress beyond the point of the crash is cleared at once. An engine that was killed from outside
makes no suspects. It knows ids only: no process, no request, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Suspects:
    """While there are groups, only the first of them runs, beside requests that were cleared since; alone if it is one
    request that crashed an engine without any other suspect.
    """

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self._groups: list[list[int]] = []
        self._cleared: set[int] = set()  # of the groups so far: they go on beside the next one
        self._is_alone = False

    @property
    def is_halving(self) -> bool:
        """Whether some requests have to wait until others are cleared."""
        return bool(self._groups)

    def __contains__(self, id: int) -> bool:
        return id in self._suspects

    def add(self, id: int) -> None:
        """A request was with another engine when that crashed: one crash more, and it is kept apart."""
        self._suspects.add(id)

    def admits(self, id: int) -> bool:
        """Whether an engine may have this request now."""
        if not self._groups:
            return True
        return id in self._groups[0] or (id in self._cleared and not self._is_alone)

    def crashed(self, held: Sequence[int]) -> int | None:
        """An engine that held these requests crashed; the one that is to blame, if that is certain."""
        again = [id for id in held if id in self._suspects]
        if not self._groups:
            self._suspects.update(held)
            if not again:
                return None
            self._groups = [again]
        group = [id for id in self._groups[0] if id in held]
        if not group:  # it crashed before it had any of them
            return None
        if len(group) > 1:
            middle = (len(group) + 1) // 2
            self._groups[:1] = [group[:middle], group[middle:]]
            self._is_alone = False
            return None
        if list(held) != group:  # not alone: perhaps one of those beside it did it
            self._is_alone = True
            return None
        self.ended(group[0])
        return group[0]

    def cleared(self, id: int) -> bool:
        """It made progress beyond the point of the crash; True if other requests may run now that might not before."""
        if id not in self._suspects:
            return False
        if self._groups and id in self._groups[0]:
            self._cleared.add(id)
        return self.ended(id)

    def ended(self, id: int) -> bool:
        """It is over, for whatever reason; True as in `cleared`."""
        self._suspects.discard(id)
        had = len(self._groups)
        self._groups = [left for group in self._groups if (left := self._uncleared(group))]
        if len(self._groups) == had:
            return False
        self._is_alone = False
        if not self._groups:
            self._cleared.clear()
        return True

    def _uncleared(self, group: Iterable[int]) -> list[int]:
        return [id for id in group if id in self._suspects]
