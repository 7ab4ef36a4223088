"""What the text of an answer consists of: reasoning, content and calls of tools, told apart as it comes.

A pure function of the whole text, however it was split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.text.call_format import CallFormat
from headway.text.thoughts import CLOSING, OPENING, Thinking, ThoughtReader
from headway.text.tokenizer import Tokenizer
from headway.text.tool_calls import CallPiece, CallReader


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Which parts there may be, and the literals of theirs that one token spells."""

    calls: CallFormat | None  # None: there are none
    thinking: Thinking
    tokens: Mapping[str, int]
    is_forced: bool = False  # there is nothing but calls, and reasoning

    @staticmethod
    def of(
        calls: CallFormat | None, thinking: Thinking, tokenizer: Tokenizer, *, is_forced: bool = False
    ) -> AnswerParts | None:
        """None: there is nothing but content."""
        marks = [] if calls is None else [*calls.marks]
        marks += [] if thinking is Thinking.NEVER else [OPENING, CLOSING]
        return AnswerParts(calls, thinking, tokenizer.added_ids(marks), is_forced) if marks or calls else None

    def reader(self, key: bytes = b"") -> PartReader:
        """Of one answer; the ids of its calls follow from `key`."""
        calls = None if self.calls is None else CallReader(self.calls, key, is_forced=self.is_forced)
        return PartReader(ThoughtReader(self.thinking), calls)


@dataclass(slots=True)
class TextParts:
    """What an answer grew by."""

    text: str
    reasoning: str = ""
    calls: Sequence[CallPiece] = field(default_factory=list)


class PartReader:
    """`push` what comes, then `finish` once."""

    def __init__(self, thoughts: ThoughtReader, calls: CallReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def push(self, text: str) -> TextParts:
        return self._parts(*self._thoughts.push(text))

    def finish(self) -> TextParts:
        parts = self._parts(*self._thoughts.finish())
        if self._calls is not None:
            parts.text += self._calls.finish()
        return parts

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls and the last one has all of its arguments."""
        return self._calls is not None and self._calls.is_complete

    def _parts(self, reasoning: str, text: str) -> TextParts:
        if self._calls is None:
            return TextParts(text, reasoning)
        text, calls = self._calls.push(text)
        return TextParts(text, reasoning, calls)
