"""Stop strings in a text that arrives in pieces.

Owns one rule: the text given out is the whole text up to the first stop string (the one that starts earliest), and
that does not depend on how the text was cut into pieces. Refuses to know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Emit(NamedTuple):
    """Text that is safe to show, and whether a stop string has ended it."""

    text: str
    matched: bool


class TextEnd(Protocol):
    """What ends a text behind a place in it that no later text changes."""

    def push(self, text: str) -> Emit:
        """Take in more text: what of it belongs to the text."""


class StopMatcher:
    """Holds back exactly the text that may still turn out to belong to a stop string.

    text so far   the answer is 4\\nUs        stop "\\nUser:"
    given out     the answer is 4
    held                         \\nUs
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string ends everything; callers refuse it"
        self._stops = tuple(stops)
        self._reach = max(map(len, stops), default=0) - 1
        self._held = ""
        self.matched = False

    def push(self, text: str) -> Emit:
        """Take in more text. After a match everything is dropped."""
        if self.matched:
            return Emit("", True)
        text = self._held + text
        start, open_from = self._first(text), self._first_open(text)
        # A stop that began earlier and is not complete goes before one that is: it would win if it came in one piece.
        if start < len(text) and start <= open_from:
            self.matched = True
            self._held = ""
            return Emit(text[:start], True)
        self._held = text[open_from:]
        return Emit(text[:open_from], False)

    def flush(self) -> Emit:
        """The text has ended: what was held is text after all, up to a stop that was waiting for an earlier one."""
        text, self._held = self._held, ""
        start = self._first(text)
        self.matched = self.matched or start < len(text)
        return Emit(text[:start], self.matched)

    def _first(self, text: str) -> int:
        """Where the first complete stop string starts; the length of the text if there is none."""
        return min((at for at in map(text.find, self._stops) if at >= 0), default=len(text))

    def _first_open(self, text: str) -> int:
        """Where the first stop string starts that runs beyond the end of the text."""
        for at in range(max(0, len(text) - self._reach), len(text)):
            tail = text[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
