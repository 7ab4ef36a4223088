"""From what a request says to the tokens of its prompt and the grammar of its answer, in turns with other clients.

Every fault is the request's and named as such. Decides nothing about the answer beyond its form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from headway.errors import RequestError
from headway.grammar.stops import PARAM, RegexStop, stop_grammar
from headway.serve import validate
from headway.serve.openai import Message, SamplingRequest
from headway.serve.service import ServedModel, Service
from headway.serve.sse import while_connected
from headway.serve.structure import WantedForm
from headway.serve.tools import WantedTools
from headway.serve.turns import LONG_BYTES
from headway.text.answer_parts import AnswerParts
from headway.text.chat import RenderOptions
from headway.values.params import SamplingParams

R = TypeVar("R")

# Text of more characters or tokens is worked on by a thread, so that one prompt does not hold up every stream.
INLINE_CHARS = 2048
NOTES = "headway.notes"  # of a scope: what of the request is not honoured
_MESSAGE_BYTES = 64  # what a message costs beside its text


class ChatPrompt(NamedTuple):
    """The tokens of rendered messages, and the parts that the text of an answer may have."""

    tokens: list[int]
    parts: AnswerParts | None


class RequestPrompts:
    """Work that depends on a request's text; what is long is done by threads, in fair turns."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def of_text(self, request: Request, model: ServedModel, text: str) -> list[int]:
        limit = validate.context_limit(model.client.info)
        return await self.encode(request, model, text, param="prompt", limit=limit, add_special=True)

    async def render(
        self,
        request: Request,
        model: ServedModel,
        messages: Sequence[Message],
        limit: int | None,
        tools: WantedTools | None = None,
        options: RenderOptions | None = None,
    ) -> ChatPrompt:
        num_chars = sum(map(len, _texts(messages)))
        validate.require_short(num_chars, model, param="messages")
        num_bytes = num_chars + _MESSAGE_BYTES * len(messages) + _num_bytes_beside(messages, tools)
        # The template runs in a process of its own and may be slow.
        rendered = await self.in_turn(
            request,
            num_bytes,
            lambda: model.template.rendered(
                validate.template_messages(messages), () if tools is None else tools.rendered, options
            ),
        )
        tokens = await self.encode(request, model, rendered.text, param="messages", limit=limit, add_special=False)
        if not tokens:
            raise RequestError("messages come to no tokens at all", param="messages")
        calls = None if tools is None else rendered.calls
        is_forced = tools is not None and tools.choice.is_required
        return ChatPrompt(tokens, AnswerParts.of(calls, rendered.thinking, model.tokenizer, is_forced=is_forced))

    async def encode(
        self, request: Request, model: ServedModel, text: str, *, param: str, limit: int | None, add_special: bool
    ) -> list[int]:
        """Token ids of a text; with `limit`, 400 as soon as there are certainly more."""
        if len(text) <= INLINE_CHARS:
            return model.tokenizer.encode(text, add_special=add_special)
        info = model.client.info
        if limit is None:
            validate.require_short(len(text), model, param=param)
            return await self.in_turn(request, len(text), lambda: model.tokenizer.encode(text, add_special))
        work = partial(model.tokenizer.encode_within, text, limit, add_special)
        tokens = await self.in_turn(request, len(text), work)
        if tokens is None:
            raise validate.too_long(len(text), info, param=param)
        return tokens

    async def formed(
        self, request: Request, model: ServedModel, form: WantedForm | None, params: SamplingParams
    ) -> SamplingParams:
        """With the grammar of the form that the answer must have, once that is known to be usable."""
        if form is None:
            return params
        checked = form.known(model.grammars)
        if checked is None:
            work = partial(form.checked, model.grammars)
            turn = self._service.checks.run(client_of(request), len(form.grammar), work)
            checked = await while_connected(request.receive, turn)
        request.scope[NOTES] = [f"{form.param}: not honoured: {warning}" for warning in checked.warnings]
        return replace(params, grammar=checked.grammar)

    async def broken(
        self, request: Request, model: ServedModel, params: SamplingParams, asked: SamplingRequest
    ) -> SamplingParams:
        """With the tokens at which a repeat ends, where repeats cost something."""
        breakers = validate.breakers_of(asked.dry_sequence_breakers)
        if not params.dry_multiplier:
            return params
        tokens = await self.in_turn(request, LONG_BYTES, partial(model.breakers.of, breakers))
        return replace(params, dry_breakers=tokens)

    async def end(self, request: Request, model: ServedModel, asked: str | list[str] | None) -> RegexStop | None:
        """What `stop_regex` says, once it is known to be usable."""
        patterns = validate.stops_of(asked, param=PARAM)
        if not patterns:
            return None
        form = WantedForm(stop_grammar(patterns), None, PARAM)
        if form.known(model.grammars) is None:
            work = partial(form.checked, model.grammars)
            turn = self._service.checks.run(client_of(request), len(form.grammar), work)
            await while_connected(request.receive, turn)
        return await self.in_turn(request, len(form.grammar), partial(RegexStop.of, patterns))

    async def in_turn(self, request: Request, num_bytes: int, work: Callable[[], R]) -> R:
        return await self._service.turns.run(client_of(request), num_bytes, work)


def client_of(request: Request) -> str:
    """Who takes turns with others: the holder of a key, else an address."""
    return key_of(request) or (request.client.host if request.client else "")


def key_of(request: Request) -> str:
    """The API key that came with a request, whether or not one is asked for."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _num_bytes_beside(messages: Sequence[Message], tools: WantedTools | None) -> int:
    """Of what is rendered beside the contents: functions, calls of them, reasoning."""
    said = sum(len(message.reasoning_content or "") for message in messages)
    calls = [message.tool_calls for message in messages if message.tool_calls]
    found = [*calls, *(() if tools is None else tools.rendered)]
    return said + (len(msgspec.json.encode(found)) if found else 0)


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (part.text or "" for part in message.content or ())
