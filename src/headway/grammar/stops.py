"""Texts that end where a regular expression first matches, found as the text comes, in time that grows with it alone.

llguidance follows the expression byte by byte and never goes back, so that no expression takes long for a text. It is
the end of a match that ends the text: the match is a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from time import thread_time
from typing import Any

from headway.errors import RequestError
from headway.grammar.limits import MOST_SLOW, PARSER
from headway.grammar.source import lark, lark_regex
from headway.text.stop import Emit

PARAM = "stop_regex"
_SLOW_S = 0.002  # for the bytes of a token; what is taken in here holds up other answers


def stop_grammar(patterns: Sequence[str]) -> str:
    """Any text up to the end of a match of one of the patterns."""
    either = "|".join(f"(?:{pattern})" for pattern in patterns)
    return lark(f"start: {lark_regex(f'(?s:.*)(?:{either})')}")


class RegexStop:
    """Where a text is in its search for a match."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._num_slow = 0  # in a row
        self.matched = False

    @staticmethod
    def of(patterns: Sequence[str]) -> RegexStop:
        """The beginning of a text; RequestError if the patterns cannot be used, or match what has no characters."""
        import llguidance

        limits = llguidance.LLParserLimits(**PARSER)  # type: ignore[arg-type]
        inner = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), stop_grammar(patterns), log_level=0, limits=limits)
        if inner.is_error():
            raise RequestError(f"{PARAM} cannot be honoured: {inner.get_error()[:500]}", param=PARAM)
        if inner.is_accepting():
            shown = json.dumps(list(patterns), ensure_ascii=False)[:200]
            raise RequestError(
                f"{PARAM} is {shown}, which the empty text matches; allowed: expressions of one character or more",
                param=PARAM,
                code="invalid_value",
            )
        return RegexStop(inner)

    def copy(self) -> RegexStop:
        """The same place, for another answer."""
        return RegexStop(self._inner.deep_copy())

    def push(self, text: str) -> Emit:
        """Take in more text: what of it belongs to the text, and whether that has ended."""
        began = thread_time()
        data = text.encode("utf-8", "replace")
        for end, byte in enumerate(data, start=1):
            if not self._inner.consume_token(byte):
                raise self._too_complex()
            if self._inner.is_accepting():
                self.matched = True
                return Emit(data[:end].decode("utf-8", "ignore"), True)
        self._num_slow = self._num_slow + 1 if thread_time() - began > _SLOW_S * max(1.0, len(data) / 16) else 0
        if self._num_slow >= MOST_SLOW:
            raise self._too_complex()
        return Emit(text, False)

    def _too_complex(self) -> RequestError:
        said = f"{PARAM} takes too long to be followed in this text; simplify it"
        return RequestError(said, param=PARAM, code="grammar_too_complex")
