"""What the text of an answer consists of: content and calls of tools, told apart as it comes.

A pure function of the whole text, however it was split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.text.call_format import CallFormat
from headway.text.tokenizer import Tokenizer
from headway.text.tool_calls import CallPiece, CallReader


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Which parts there may be, and the literals of theirs that one token spells."""

    calls: CallFormat
    tokens: Mapping[str, int]
    is_forced: bool = False  # there is nothing but calls

    @staticmethod
    def of(calls: CallFormat, tokenizer: Tokenizer, *, is_forced: bool = False) -> AnswerParts:
        return AnswerParts(calls, tokenizer.added_ids(calls.marks), is_forced)

    def reader(self, key: bytes = b"") -> PartReader:
        """Of one answer; the ids of its calls follow from `key`."""
        return PartReader(CallReader(self.calls, key, is_forced=self.is_forced))


@dataclass(slots=True)
class TextParts:
    """What an answer grew by."""

    text: str = ""
    calls: Sequence[CallPiece] = field(default_factory=list)


class PartReader:
    """`push` what comes, then `finish` once."""

    def __init__(self, calls: CallReader) -> None:
        self._calls = calls

    def push(self, text: str) -> TextParts:
        return TextParts(*self._calls.push(text))

    def finish(self) -> TextParts:
        return TextParts(self._calls.finish())

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls and the last one has all of its arguments."""
        return self._calls.is_complete
