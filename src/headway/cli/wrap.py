"""Text that comes in pieces, broken between words at the terminal's width. Code between ``` is left as it is."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

_PARTS = re.compile(r"([ \n])")


class Wrapper:
    """A word is written once it is complete; the width is asked anew for each, so that a resize counts at once."""

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._num_blanks = 0  # not written: a line does not end with them
        self._word = ""
        self._line = ""  # as far as it decides whether code begins or ends
        self._is_code = False

    def feed(self, text: str) -> None:
        for part in _PARTS.split(text):
            if part == "\n":
                self._end_line()
            elif part == " ":
                self._end_word()
                self._num_blanks += 1
            else:
                self._word += part
            if part != "\n" and len(self._line) < 3:
                self._line += part

    def flush(self) -> None:
        """Nothing more comes."""
        self._end_word()

    def _end_word(self) -> None:
        if not self._word:
            return
        size = cell_len(self._word)
        is_too_long = self._column + self._num_blanks + size > self._width()
        if self._column and is_too_long and not self._is_code and not self._line.startswith("```"):
            self._write("\n")
            self._column = self._num_blanks = 0
        self._write(" " * self._num_blanks + self._word)
        self._column += self._num_blanks + size
        self._num_blanks, self._word = 0, ""

    def _end_line(self) -> None:
        self._end_word()
        if self._line.startswith("```"):
            self._is_code = not self._is_code
        self._write("\n")
        self._column = self._num_blanks = 0
        self._line = ""
