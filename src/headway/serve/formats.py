"""Response formats: chat and text completions, whole and in chunks.

Both formats offer the same methods, so that routes and streams do not know which one they serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headway.serve.answer import Delta
from headway.serve.openai import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    ChatUsageChunk,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionUsageChunk,
    FunctionDelta,
    RequestReport,
    ResponseNotes,
    TokenEntry,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from headway.text.tool_calls import CallPiece

T = TypeVar("T")


class FinishedAnswer:
    """An answer that is collected to its end."""

    def __init__(self, index: int, has_logprobs: bool) -> None:
        self.index = index
        self.entries: list[TokenEntry] | None = [] if has_logprobs else None
        self.finish = "stop"
        self.calls: list[ToolCall] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def add(self, delta: Delta) -> None:
        """It grew by this."""
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        if self.entries is not None:
            self.entries.extend(delta.entries)
        for piece in delta.calls:
            if piece.id is not None:
                self.calls.append(ToolCall(piece.id, CalledFunction(piece.name or "", "")))
            self.calls[piece.index].function.arguments += piece.arguments
        self.finish = delta.finish or self.finish

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def message(self) -> AssistantMessage:
        """As a chat has it."""
        message = AssistantMessage(self.text, reasoning_content="".join(self._thoughts) or UNSET)
        if self.calls:
            message.tool_calls, message.content = self.calls, message.content or None
        return message


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its completions begin with it.

    The entries are of all tokens but the first, which has no probability; None: they are not wanted.
    """

    text: str
    first: str
    entries: Sequence[TokenEntry] | None = None


class JsonTexts(dict[int, bytes | None]):
    """Texts of tokens as JSON, each encoded once. None: that token has no text of its own; empty: it has no text."""

    def __init__(self, texts: Mapping[int, str | None]) -> None:
        self._texts = texts

    def __missing__(self, token: int) -> bytes | None:
        text = self._texts[token]
        encoded = self[token] = msgspec.json.encode(text) if text else None if text is None else b""
        return encoded


class Frame:
    """A chunk with a hole where its text goes: encoding the rest once makes a chunk three times as cheap."""

    def __init__(self, write: Callable[[str], bytes]) -> None:
        hole = token_hex(16)
        self.before, self.behind = write(hole).split(f'"{hole}"'.encode())

    def event(self) -> tuple[bytes, bytes]:
        """An event of it, without its text: what is before that, and what is behind it."""
        return b"data: " + self.before, self.behind + b"\n\n"

    def fill(self, text: str) -> bytes:
        return b"".join((self.before, msgspec.json.encode(text), self.behind))


class Format(Protocol):
    """Writes responses and chunks of one kind as JSON."""

    def opening(self, index: int) -> bytes | None:
        """The chunk that begins an answer, if this kind has one."""

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The chunk for what an answer grew by: reasoning, text or one piece of a call."""

    def plain(self, index: int) -> Frame | None:
        """What `chunk` fills in for text alone; None: it has more to say about an answer than its text."""

    def usage(self, usage: Usage, report: RequestReport | None) -> bytes:
        """The closing chunk with the counts."""

    def whole(self, answers: Sequence[FinishedAnswer], usage: Usage, report: RequestReport | None) -> bytes:
        """The response that is not streamed."""


@dataclass(slots=True)
class ChatFormat:
    """Chat completions."""

    id: str
    created: int
    model: str
    fingerprint: str
    has_usage: bool
    has_logprobs: bool
    tier: str | None = None
    warnings: list[str] = field(default_factory=list)
    counts: Callable[[], Usage] | None = None  # so far, for every chunk; None: they are not wanted
    _has_warned: bool = False
    _frames: dict[int, Frame] = field(default_factory=dict)  # answer -> its plain chunk

    def opening(self, index: int) -> bytes:
        return self._write([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])

    def chunk(self, index: int, delta: Delta) -> bytes:
        if (
            delta.text
            and not (delta.entries or delta.calls or delta.reasoning or delta.finish)
            and (frame := self.plain(index)) is not None
        ):
            return frame.fill(delta.text)
        said = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        if delta.reasoning:
            said.reasoning_content = delta.reasoning
        if delta.calls:
            said.tool_calls = [_call_delta(piece) for piece in delta.calls]
        logprobs = ChatLogprobs(delta.entries) if self.has_logprobs and delta.entries else None
        return self._write([ChatChunkChoice(index, said, logprobs, delta.finish)])

    def usage(self, usage: Usage, report: RequestReport | None) -> bytes:
        return self._write([], usage, report)

    def whole(self, answers: Sequence[FinishedAnswer], usage: Usage, report: RequestReport | None) -> bytes:
        choices = [
            ChatChoice(
                answer.index,
                answer.message(),
                None if answer.entries is None else ChatLogprobs(answer.entries),
                answer.finish,
            )
            for answer in answers
        ]
        response = ChatResponse(self.id, self.created, self.model, choices, usage, self.fingerprint)
        response.service_tier, response.headway = _or_unset(self.tier), _reported(report, self.warnings)
        return msgspec.json.encode(response)

    def plain(self, index: int) -> Frame | None:
        if index not in self._frames and self.counts is None:
            self._frames[index] = Frame(lambda text: self._write([ChatChunkChoice(index, ChatDelta(content=text))]))
        return self._frames.get(index)

    def _write(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, report: RequestReport | None = None
    ) -> bytes:
        kind = ChatUsageChunk if self.has_usage else ChatChunk
        chunk = kind(self.id, self.created, self.model, choices, self.fingerprint)
        chunk.service_tier = _or_unset(self.tier)
        if isinstance(chunk, ChatUsageChunk):
            chunk.usage = self.counts() if usage is None and self.counts is not None else usage
            chunk.headway = _reported(report, self.warnings)
        elif self.warnings and not self._has_warned:
            chunk.headway, self._has_warned = ResponseNotes(self.warnings), True
        return msgspec.json.encode(chunk)


@dataclass(slots=True)
class CompletionFormat:
    """Text completions, with their older shape of log probabilities."""

    id: str
    created: int
    model: str
    fingerprint: str
    has_usage: bool
    top_logprobs: int | None
    tier: str | None = None
    warnings: list[str] = field(default_factory=list)
    counts: Callable[[], Usage] | None = None  # so far, for every chunk; None: they are not wanted
    _has_warned: bool = False
    echoes: Sequence[Echo] = ()  # of each prompt, if its text comes before that of its answers
    num_each: int = 1  # answers to a prompt
    _offsets: dict[int, int] = field(default_factory=dict)  # answer -> characters its tokens spell so far
    _frames: dict[int, Frame] = field(default_factory=dict)  # answer -> its plain chunk

    def opening(self, index: int) -> bytes | None:
        if not self.echoes:
            return None
        echo = self.echoes[index // self.num_each]
        return self._write([CompletionChoice(index, echo.text, self._echoed(index, echo))])

    def chunk(self, index: int, delta: Delta) -> bytes:
        if not delta.entries and delta.finish is None and (frame := self.plain(index)) is not None:
            return frame.fill(delta.text)
        logprobs = self._logprobs(index, delta.entries) if delta.entries else None
        return self._write([CompletionChoice(index, delta.text, logprobs, delta.finish)])

    def usage(self, usage: Usage, report: RequestReport | None) -> bytes:
        return self._write([], usage, report)

    def whole(self, answers: Sequence[FinishedAnswer], usage: Usage, report: RequestReport | None) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        response = CompletionUsageChunk(self.id, self.created, self.model, choices, self.fingerprint, usage=usage)
        response.service_tier, response.headway = _or_unset(self.tier), _reported(report, self.warnings)
        return msgspec.json.encode(response)

    def alone(self, num_choices: int, num_tokens: int, report: RequestReport | None) -> bytes:
        """The response with nothing but the prompts, which have so many tokens; `report`: if they were scored."""
        answers = [FinishedAnswer(index, False) for index in range(num_choices)]
        for answer in answers:
            answer.finish = "length"
        return self.whole(answers, Usage(num_tokens, 0, num_tokens), report or _nothing_done())

    def _choice(self, answer: FinishedAnswer) -> CompletionChoice:
        echo = self.echoes[answer.index // self.num_each] if self.echoes else None
        text = answer.text if echo is None else echo.text + answer.text
        told = None if echo is None else self._echoed(answer.index, echo)
        if answer.entries is not None:
            more = self._logprobs(answer.index, answer.entries)
            told = more if told is None else _joined(told, more)
        return CompletionChoice(answer.index, text, told, answer.finish)

    def _echoed(self, index: int, echo: Echo) -> CompletionLogprobs | None:
        """The log probabilities of a prompt; None: they are not wanted."""
        if echo.entries is None:
            return None
        self._offsets[index] = len(echo.first)
        tops: list[dict[str, float] | None] | None = [None] if self.top_logprobs else None
        return _joined(CompletionLogprobs([echo.first], [None], tops, [0]), self._logprobs(index, echo.entries))

    def _logprobs(self, index: int, entries: Sequence[TokenEntry]) -> CompletionLogprobs:
        offsets: list[int] = []
        at = self._offsets.get(index, 0)
        for entry in entries:
            offsets.append(at)
            at += len(entry.token)
        self._offsets[index] = at
        tops: list[dict[str, float] | None] = [
            {top.token: top.logprob for top in entry.top_logprobs} for entry in entries
        ]
        return CompletionLogprobs(
            [entry.token for entry in entries],
            [entry.logprob for entry in entries],
            tops if self.top_logprobs else None,
            offsets,
        )

    def plain(self, index: int) -> Frame | None:
        if index not in self._frames and self.counts is None and (self._has_warned or not self.warnings):
            self._frames[index] = Frame(lambda text: self._write([CompletionChoice(index, text)]))
        return self._frames.get(index)

    def _write(
        self, choices: list[CompletionChoice], usage: Usage | None = None, report: RequestReport | None = None
    ) -> bytes:
        kind = CompletionUsageChunk if self.has_usage else CompletionChunk
        chunk = kind(self.id, self.created, self.model, choices, self.fingerprint)
        chunk.service_tier = _or_unset(self.tier)
        if isinstance(chunk, CompletionUsageChunk):
            chunk.usage = self.counts() if usage is None and self.counts is not None else usage
            chunk.headway = _reported(report, self.warnings)
        elif self.warnings and not self._has_warned:
            chunk.headway, self._has_warned = ResponseNotes(self.warnings), True
        return msgspec.json.encode(chunk)


def _joined(first: CompletionLogprobs, more: CompletionLogprobs) -> CompletionLogprobs:
    tops = None if first.top_logprobs is None else first.top_logprobs + (more.top_logprobs or [])
    offsets = first.text_offset + more.text_offset
    return CompletionLogprobs(first.tokens + more.tokens, first.token_logprobs + more.token_logprobs, tops, offsets)


def _call_delta(piece: CallPiece) -> ToolCallDelta:
    function = FunctionDelta(piece.name, piece.arguments)
    return ToolCallDelta(piece.index, piece.id, None if piece.id is None else "function", function)


def _reported(report: RequestReport | None, warnings: list[str]) -> RequestReport | UnsetType:
    if report is not None and warnings:
        report.warnings = warnings
    return _or_unset(report)


def _nothing_done() -> RequestReport:
    """Of a request for which the engine was not asked."""
    return RequestReport(
        queue_ms=0.0,
        prefill_ms=0.0,
        decode_ms=0.0,
        preempted_ms=0.0,
        total_ms=0.0,
        ttft_ms=0.0,
        predicted_ttft_ms=None,
        preemptions=0,
        tokens_recomputed=0,
    )


def _or_unset(value: T | None) -> T | UnsetType:
    """What is not known is left out, not null: clients know no such field."""
    return UNSET if value is None else value
