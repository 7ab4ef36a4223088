"""The text of one answer as its tokens come: detokenized, and cut exactly before the first stop string.

A pure function of the tokens pushed, however they were split. It knows no request, no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from headway.text.detok import Detokenizer
from headway.text.stop import StopMatcher
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
    ) -> None:
        """`shown_ids` are special tokens that are shown as others are."""
        self.is_stopped = False
        self._detok = Detokenizer(tokenizer, shown_ids=shown_ids)
        self._stop = StopMatcher(stops) if stops else None
        self._end_ids = frozenset(end_ids)  # tokens that end an answer and are no part of its text
        self._is_plain = not stops and self._end_ids <= tokenizer.special_ids

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
        if self._stop is None:
            return Growth(self._detok.push(shown), len(tokens))
        texts: list[str] = []
        for num_taken, token in enumerate(shown, start=1):
            text, is_matched = self._stop.push(self._detok.push([token]))
            texts.append(text)
            if is_matched:
                self.is_stopped = True
                return Growth("".join(texts), num_taken)
        return Growth("".join(texts), len(tokens))

    def finish(self) -> str:
        """No more tokens come: the text that was held back. It may still complete a stop string."""
        if self.is_stopped:
            return ""
        text = self._detok.flush()
        if self._stop is None:
            return text
        shown = self._stop.push(text)
        rest = self._stop.flush()
        self.is_stopped = shown.matched or rest.matched
        return shown.text + rest.text
