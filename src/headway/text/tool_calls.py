"""Calls of tools in the text of an answer, as it comes: told from what stands before them, with name and arguments.

A pure function of the whole text, however it was split. That the text follows the literals of its format is the
grammar's concern; what does not is left out of calls, and never raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from headway.text.call_format import CallFormat


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a call grew by: its id and name, at the beginning, or more of the text of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class CallReader:
    """Holds back what may still turn out to be a literal, and blanks that may stand before a call."""

    def __init__(self, format: CallFormat, key: bytes = b"", *, is_forced: bool = False) -> None:
        """Ids follow from `key` and the index of a call. Forced: the text is nothing but calls."""
        self._format = format
        self._key = key
        self._is_forced = is_forced
        self._opening = format.opening or format.head
        self._held = ""
        self._state: Callable[[list[str], list[CallPiece]], bool] = self._read_text
        self._num_calls = 0
        self._has_text = False
        self._depth = 0  # of brackets within arguments
        self._in_string = self._is_escaped = False
        self.is_complete = False  # the last call has all of its arguments

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """The text outside of calls that is certain now, and what calls grew by."""
        self._held += text
        texts: list[str] = []
        pieces: list[CallPiece] = []
        while self._state(texts, pieces):
            pass
        return "".join(texts), pieces

    def finish(self) -> str:
        """The text has ended: what was held before any call is text after all, unless a call begins in it."""
        held, self._held = self._held, ""
        return held if self._state == self._read_text and not self._is_forced else ""

    def _read_text(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        """Text in front of a call. Each of these methods takes what it can of the held text; False: it needs more."""
        at = self._held.find(self._opening)
        if at >= 0 and (self._format.opening or not (at or self._has_text)):
            texts.append(self._held[:at].rstrip())
            self._held = self._held[at + len(self._format.opening) :]
            self._state = self._read_head
            return True
        is_over = not self._format.opening and (self._has_text or not self._opening.startswith(self._held))
        certain = len(self._held) if is_over else self._certain()
        self._has_text = self._has_text or certain > 0
        texts.append(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _certain(self) -> int:
        """How much of the held text neither begins the opening nor is blanks in front of where it may begin."""
        text = self._held
        start = max(0, len(text) - len(self._opening) + 1)
        at = next((at for at in range(start, len(text)) if self._opening.startswith(text[at:])), len(text))
        return len(text[:at].rstrip())

    def _read_head(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        return self._take(self._format.head, self._read_name)

    def _read_name(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        name, quote, _ = self._held.partition('"')
        if not quote:
            return False
        self._held = self._held[len(name) :]
        self.is_complete = False
        digest = hashlib.sha256(self._key + b"%d" % self._num_calls).hexdigest()
        pieces.append(CallPiece(self._num_calls, id=f"call_{digest[:24]}", name=name))
        self._num_calls += 1
        self._state = self._read_middle
        return True

    def _read_middle(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        return self._take(self._format.middle, self._read_arguments)

    def _read_arguments(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        end = self._end_of_arguments()
        taken, self._held = self._held[:end], self._held[end:]
        if taken:
            pieces.append(CallPiece(self._num_calls - 1, taken))
        if self.is_complete:
            self._state = self._read_end
        return self.is_complete

    def _end_of_arguments(self) -> int:
        """Where the object ends within the held text; its length if it goes on."""
        for at, char in enumerate(self._held):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_complete = True
                    return at + 1
        return len(self._held)

    def _read_end(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        between = self._format.between
        if between is None:
            return self._take(self._format.end, self._drop)
        return self._take(self._format.end + between + self._format.opening, self._read_head)

    def _drop(self, texts: list[str], pieces: list[CallPiece]) -> bool:
        self._held = ""
        return False

    def _take(self, literal: str, then: Callable[[list[str], list[CallPiece]], bool]) -> bool:
        """Go on behind a literal; text that does not follow it is no part of any call."""
        if self._held.startswith(literal):
            self._held = self._held[len(literal) :]
            self._state = then
            return True
        if not literal.startswith(self._held):
            self._state = self._drop
            return True
        return False
