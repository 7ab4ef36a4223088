"""One choice of a response as it grows: outputs of the engine in; text, counts and log probabilities out.

The text itself, with its stop strings, is `text.answer`'s; this file adds what a response says about it. It is a
pure function of the outputs pushed, however they were split, and knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.engine.client import Output
from headway.serve.openai import TokenEntry, TopLogprob
from headway.text.answer import AnswerText
from headway.text.answer_parts import AnswerParts, PartReader
from headway.text.stop import TextEnd
from headway.text.tokenizer import Tokenizer
from headway.text.tool_calls import CallPiece
from headway.values.params import SamplingParams
from headway.values.plan import TokenLogprob


@dataclass(slots=True)
class Delta:
    """What one output added: text that is safe to show, log probabilities, calls, and the finish reason at the end.

    The reason is that of the interface: an answer that ends with calls ends by `tool_calls`, for the engine by `stop`.
    """

    text: str
    entries: list[TokenEntry]
    finish: str | None = None
    calls: Sequence[CallPiece] = field(default_factory=tuple)
    reasoning: str = ""

    def singly(self) -> list[Delta]:
        """The same in parts that have reasoning, text or one piece of a call each; one part, if it has none."""
        if not self.calls and not (self.text and self.reasoning):
            return [self]
        parts = [Delta("", [], reasoning=self.reasoning)] if self.reasoning else []
        parts += [Delta(self.text, [])] if self.text else []
        parts += [Delta("", [], calls=(piece,)) for piece in self.calls]
        parts[0].entries, parts[-1].finish = self.entries, self.finish
        return parts


class ServedAnswer:
    """Counts every token up to the one that ended it; nothing is taken in after `finish` is set."""

    __slots__ = (
        *("_reader", "_text", "_tokenizer", "_wants_logprobs", "cached_tokens", "end", "finish", "id", "index"),
        *("last", "longest", "num_tokens"),
    )

    def __init__(
        self,
        index: int,
        id: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        parts: AnswerParts | None = None,
        key: bytes = b"",
        end: TextEnd | None = None,
    ) -> None:
        """`parts`: its text has others than content; names of calls follow from `key`. `end` ends the text too."""
        self.index = index
        self.id = id
        self.num_tokens = 0
        self.last = self.longest = (
            0.0  # when it last grew, 0 before its first token, and its longest ITL, for its owner
        )
        self.cached_tokens = 0
        self.end: Output | None = None  # the terminal output, with its times
        self.finish: str | None = None
        self._tokenizer = tokenizer
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        shown_ids = () if parts is None else parts.tokens.values()
        self._text = AnswerText(tokenizer, params.stops, end_ids, shown_ids, end)
        self._reader = None if parts is None else parts.reader(key)
        self._wants_logprobs = params.logprobs is not None

    @property
    def texts(self) -> Mapping[int, str | None] | None:
        """What one more token would add, by token, if that is nothing but text; None: all outputs have to be pushed.

        It stays true until something is pushed; what is not pushed for that has to be counted.
        """
        has_more = self._wants_logprobs or self.finish is not None or self._reader is not None
        return None if has_more else self._text.texts

    def push(self, output: Output) -> Delta:
        """Take in an output; `finish` of the delta is set once, when the answer ends."""
        if output.finish is not None:
            self.cached_tokens = output.cached_tokens
            self.end = output
        if self.finish is not None:
            return Delta("", [])
        text, num_taken = self._text.push(output.tokens)
        if output.finish is not None:
            text += self._text.finish()
        self.finish = "stop" if self._text.is_stopped else output.finish
        self.num_tokens += num_taken
        entries = self._entries(output.tokens[:num_taken], output.logprobs) if self._wants_logprobs else []
        if self._reader is None:
            return Delta(text, entries, self.finish)
        return self._parted(text, entries, self._reader)

    def _parted(self, text: str, entries: list[TokenEntry], reader: PartReader) -> Delta:
        parts = reader.push(text)
        delta = Delta(parts.text, entries, self.finish, parts.calls, parts.reasoning)
        if self.finish is not None:
            rest = reader.finish()
            delta.text += rest.text
            delta.reasoning += rest.reasoning
            if self.finish == "stop" and reader.ends_with_calls:
                delta.finish = "tool_calls"
        return delta

    def _entries(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[TokenEntry]:
        return [self._entry(token, logprob) for token, logprob in zip(tokens, logprobs, strict=False)]

    def _entry(self, token: int, logprob: TokenLogprob) -> TokenEntry:
        top = [
            TopLogprob(self._tokenizer.token_text(other), _finite(value), list(self._tokenizer.token_bytes(other)))
            for other, value in logprob.top
        ]
        text, raw = self._tokenizer.token_text(token), list(self._tokenizer.token_bytes(token))
        return TokenEntry(text, _finite(logprob.logprob), raw, top)


def _finite(logprob: float) -> float:
    # JSON has no infinity; the interface's own word for "practically never" is -9999.
    return max(logprob, -9999.0)
