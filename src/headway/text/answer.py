"""The text of one answer as its tokens come: detokenized, and cut exactly before the first stop string.

A pure function of the tokens pushed, however they were split. It knows no request, no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from headway.text.detok import Detokenizer
from headway.text.stop import StopMatcher, TextEnd
from headway.text.tokenizer import Tokenizer


class Growth(NamedTuple):
    """Text that is safe to show, and how many of the pushed tokens belong to the answer."""

    text: str
    num_taken: int


class AnswerText:
    """Once `is_stopped` nothing more is taken in; text that may begin a stop string is held back until it is clear."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        end_ids: Collection[int],
        shown_ids: Collection[int] = (),
        end: TextEnd | None = None,
    ) -> None:
        """`shown_ids` are special tokens that are shown as others are; `end` ends the text beside stop strings."""
        self.is_stopped = False
        self._detok = Detokenizer(tokenizer, shown_ids=shown_ids)
        self._stop = StopMatcher(stops) if stops else None
        self._end = end
        self._end_ids = frozenset(end_ids)  # tokens that end an answer and are no part of its text
        self._is_plain = not stops and end is None and self._end_ids <= tokenizer.special_ids

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        """What `push` of one token would show now and change nothing, by token; None: all tokens have to be pushed.

        It stays true until something is pushed.
        """
        return self._detok.texts if self._is_plain else None

    def push(self, tokens: Sequence[int]) -> Growth:
        """Take tokens in. An end token counts but shows nothing; what comes after a stop string does not count."""
        if self.is_stopped:
            return Growth("", 0)
        shown = tokens[:-1] if tokens and tokens[-1] in self._end_ids else tokens
        if self._stop is None and self._end is None:
            return Growth(self._detok.push(shown), len(tokens))
        texts: list[str] = []
        for num_taken, token in enumerate(shown, start=1):
            texts.append(self._stopped(self._detok.push([token])))
            if self.is_stopped:
                return Growth("".join(texts), num_taken)
        return Growth("".join(texts), len(tokens))

    def finish(self) -> str:
        """No more tokens come: the text that was held back. It may still complete a stop string."""
        if self.is_stopped:
            return ""
        text = self._stopped(self._detok.flush())
        return text if self.is_stopped else text + self._flushed()

    def _stopped(self, text: str) -> str:
        """Of more text what is safe to show; it may stop the answer."""
        has_ended = False
        if self._end is not None:
            text, has_ended = self._end.push(text)
        if self._stop is not None:
            text, self.is_stopped = self._stop.push(text)
        if has_ended and not self.is_stopped:
            text += self._flushed()
            self.is_stopped = True
        return text

    def _flushed(self) -> str:
        """What was held for a stop string; it may still complete one."""
        if self._stop is None:
            return ""
        rest = self._stop.flush()
        self.is_stopped = rest.matched
        return rest.text
