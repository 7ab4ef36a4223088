"""Which blocks came to the prefix cache and went: for a front end that chooses among engines by what they hold."""

from __future__ import annotations

from collections.abc import Callable

from headway.engine.messages import KEY_BYTES, BlockNews


class BlockLog:
    """Called by the ledger's index with every change; what changed is kept once it is watched."""

    def __init__(self) -> None:
        self._held: set[bytes] = set()
        self.also: Callable[[bytes, bool], object] | None = None  # told the same, watched or not
        self._changes: dict[bytes, bool] | None = None  # key -> present, since the last news; None: it is not watched

    def __call__(self, key: bytes, is_here: bool) -> None:
        if is_here:
            self._held.add(key)
        else:
            self._held.discard(key)
        if self._changes is not None:
            self._changes[key] = is_here
        if self.also is not None:
            self.also(key, is_here)

    def watch(self) -> BlockNews:
        """All blocks that are there, and keep what changes from now on; news to come may repeat some of it."""
        self._changes = {} if self._changes is None else self._changes
        return BlockNews([key[:KEY_BYTES] for key in self._held], is_whole=True)

    def news(self) -> BlockNews | None:
        """What came and went since the last call; None: nothing, or it is not watched."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        added = [key[:KEY_BYTES] for key, is_here in changes.items() if is_here]
        return BlockNews(added, [key[:KEY_BYTES] for key, is_here in changes.items() if not is_here])
