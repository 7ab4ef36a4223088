"""From bytes on a connection to a typed request: size, encoding, JSON, types.

Every fault in a body leaves as a 4xx that names the field where there is one. Known fields that we cannot
honour and that would change the answer are refused here. Unknown ones are reported to the caller and logged once per
name; a strict decoder refuses them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from headway.errors import RequestError
from headway.request_limits import LIMITS
from headway.serve.intake import BodyIntake, BodyRoom
from headway.serve.openai import (
    ContentPart,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from headway.serve.problem import Problem
from headway.serve.refused import REFUSED, SETTLED
from headway.text.chat import ROLES

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key` in `)?\$(.*?)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_MAX_LOGGED_NAMES = 100
_MAX_NAMED = 16
_MAX_NAME_CHARS = 64
_MAX_RESCANNED_BYTES = 64 * 1024
# Six bytes write any character of a string, and a number has at most 24; what is larger cannot be within its limits.
_MAX_FIELD_BYTES = {
    "stop": LIMITS.stops * (6 * LIMITS.stop_chars + 8) + 64,
    "stop_regex": LIMITS.stops * (6 * LIMITS.stop_chars + 8) + 64,
    "dry_sequence_breakers": LIMITS.stops * (6 * LIMITS.stop_chars + 8) + 64,
    "stop_token_ids": 32 * LIMITS.stop_token_ids + 64,
    "logit_bias": 64 * LIMITS.logit_bias + 64,
    "slo": 4096,
    "response_format": 2 * LIMITS.grammar_chars,
    "structured_outputs": 2 * LIMITS.grammar_chars,
    "stream_options": 4096,
    "tools": 2 * LIMITS.grammar_chars,
    "tool_choice": 4096,
    "chat_template_kwargs": 64 * 1024,
}
# What is understood inside other fields than messages, by path; [] is each entry of a list that is an object.
_INNER = {
    "response_format": ResponseFormat.__struct_fields__,
    "response_format.json_schema": JsonSchemaFormat.__struct_fields__,
    "structured_outputs": StructuredOutputs.__struct_fields__,
    "tools[]": ("type", "function"),
    "tools[].function": ("name", "description", "parameters", "strict"),
    "tool_choice": ("type", "function"),
    "tool_choice.function": ("name",),
    "documents[]": ("text",),
    "stream_options": StreamOptions.__struct_fields__,
}
_NOTHING = (b"null", b"[]", b"{}", b'""')  # clients repeat messages with all their empty fields
_Fields = dict[str, msgspec.Raw]

IGNORED = "headway.ignored"
"""Where a request's scope keeps the fields that were not understood."""
_NON_FINITE = object()
_TOKENS = re.compile(rb"\s*\[\s*[\[\d]")


class _Prompt(msgspec.Struct):
    """Of a body its prompt alone, undecoded; all else is skipped."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")


class ClientGone(Exception):
    """The client closed the connection; no response can be sent."""


async def read_body(request: Request, max_bytes: int, *, room: BodyRoom | None = None, any_type: bool = False) -> bytes:
    """The whole body, or 413, 415, 408. `room` bounds what is read at a time."""
    _require_json(request, any_type)
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()) or int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    deadline = asyncio.get_running_loop().time() + LIMITS.body_s
    body = bytearray()
    with room or BodyIntake().reading("") as room:
        while True:
            try:
                # The deadline moves with what has come: a slow network is served, a client that dribbles is not.
                async with asyncio.timeout_at(deadline + len(body) / LIMITS.body_rate):
                    message = await request.receive()
            except TimeoutError:
                raise _too_slow(len(body)) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            deadline += await room.take(len(chunk))
            body += chunk
            if not message.get("more_body", False):
                return bytes(body)


def _require_json(request: Request, any_type: bool) -> None:
    """415 or 413 by the head alone."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Problem(415, f"content-encoding is {encoding[:32]!r}; allowed: none", code="unsupported_encoding")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another origin may send text, forms and bodies of no type without asking first, but never without
    # saying where it comes from. Forms are what curl and urllib call a body whose type they are not told.
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    is_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    is_untold = kind in ("", "application/x-www-form-urlencoded") and not is_page
    if not (any_type or is_json or is_untold):
        said = f"content-type is {kind[:64]!r}" if kind else "there is no content-type"
        raise Problem(415, f"{said}; allowed: application/json", code="unsupported_content_type")


def _too_large(max_bytes: int) -> Problem:
    return Problem(
        413,
        f"the body is larger than {max_bytes} bytes, the most this server takes; send less",
        code="body_too_large",
        headers={"connection": "close"},
        is_body_unread=True,
    )


def _too_slow(num_bytes: int) -> Problem:
    return Problem(
        408,
        f"after {num_bytes} bytes the body is not complete; it may take {LIMITS.body_s:g} s and a second more for "
        f"each {LIMITS.body_rate} bytes",
        code="body_timeout",
        headers={"connection": "close", "x-should-retry": "false"},
    )


class Decoded(NamedTuple, Generic[T]):
    """A request, and the fields of its body that were not understood: by path, at most 16 of them and a count."""

    request: T
    ignored: list[str]


class BodyDecoder:
    """Decodes bodies to structs; remembers at most 100 unknown field names it has logged."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._logged: set[str] = set()
        self._is_strict = is_strict
        self._fields: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)

    def decode(self, body: bytes, kind: type[T], context: int = 0) -> Decoded[T]:
        """The body as `kind`, or `RequestError`; `context` is the model's, in tokens, if that bounds it.

        Time and memory are bounded by the limits, whatever the body holds.
        """
        try:
            _require_few_values(body, kind, max(LIMITS.values, 2 * context))
            str(body, "utf-8")  # values of unknown fields are skipped below, not read
            fields = self._fields.decode(body)
            _require_bounds(fields)
            self._refuse(fields, kind)
            request = msgspec.json.decode(body, type=kind)
            _require_few_messages(request, context)
            return Decoded(request, self._unknown(fields, kind))
        except msgspec.ValidationError as error:
            raise _type_fault(str(error)) from None
        except RecursionError:
            raise RequestError("the body is nested too deeply", code="invalid_json") from None
        except (msgspec.DecodeError, UnicodeError) as error:
            raise _syntax_fault(body, str(error)) from None

    def _refuse(self, fields: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
        for name in fields:
            if name in kind.__struct_fields__:
                continue
            is_harmless = REFUSED.get(name)
            if is_harmless is None:
                continue
            value = msgspec.json.decode(fields[name])
            if value is not None and not is_harmless(value, fields):
                raise RequestError(
                    f"{name} is not supported by this server and would change the answer; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )

    def _unknown(self, fields: _Fields, kind: type[msgspec.Struct]) -> list[str]:
        names = [
            name
            for name, value in fields.items()
            if name not in kind.__struct_fields__ and name not in SETTLED and _head(value) != b"null"
        ]
        paths = {name: name for name in names} | _inside(fields, kind)
        if paths and self._is_strict:
            raise _unknown_fault(next(iter(paths.values())), kind)
        for name in paths:
            self._log_unknown(name)
        shown = [path[:_MAX_NAME_CHARS] for path in paths.values()]
        return shown if len(shown) <= _MAX_NAMED else [*shown[:_MAX_NAMED], f"{len(shown) - _MAX_NAMED} more"]

    def _log_unknown(self, name: str) -> None:
        if name in self._logged or len(self._logged) >= _MAX_LOGGED_NAMES:
            return
        self._logged.add(name)
        log.warning("unknown field %.64r is ignored", name)


def _require_few_values(body: bytes, kind: type[msgspec.Struct], most: int) -> None:
    """Every value of a body but one is behind a comma or the first one in brackets; counting these takes no time.

    Objects are what decoding costs: 8 MB of them hold up the event loop for a second, 8 MB of text do not, and 8 MB of
    token ids hardly.
    """
    if len(body) <= most:
        return
    num_values = _num_values(body)
    if num_values > most and "prompt" in kind.__struct_fields__:
        prompt = bytes(msgspec.json.decode(body, type=_Prompt).prompt)
        if _TOKENS.match(prompt) and prompt.count(b"[") <= LIMITS.fields:
            num_values -= _num_values(prompt)
    if num_values > most:
        raise RequestError(
            f"the body has {num_values} commas and opening brackets; allowed: up to {most}; send less",
            code="too_many_values",
        )


def _num_values(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _require_few_messages(request: msgspec.Struct, context: int) -> None:
    """A message is at least one token of a prompt."""
    messages = getattr(request, "messages", None)
    if context and messages is not None and len(messages) > context:
        raise RequestError(
            f"messages has {len(messages)} entries; this model's context is {context} tokens; send fewer",
            param="messages",
            code="context_length_exceeded",
        )


def _require_bounds(fields: _Fields) -> None:
    """Refuse by number of fields and by size what would take long to decode."""
    if len(fields) > LIMITS.fields:
        raise RequestError(f"the body has {len(fields)} fields; allowed: up to {LIMITS.fields}", code="too_many_values")
    for name, most in _MAX_FIELD_BYTES.items():
        raw = fields.get(name)
        if raw is not None and len(memoryview(raw)) > most:
            raise RequestError(f"{name} takes {len(memoryview(raw))} bytes; allowed: up to {most}", param=name)


def _inside(fields: _Fields, kind: type[msgspec.Struct]) -> dict[str, str]:
    """Fields inside others that are not understood, name -> path of the first; types are right."""
    found: dict[str, str] = {}
    given = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    for index, message in enumerate(_objects(given.get("messages"))):
        where = f"messages[{index}]"
        for at, part in enumerate(_objects(message.get("content"))):
            _note(found, part, ContentPart.__struct_fields__, f"{where}.content[{at}]")
        _note(found, message, Message.__struct_fields__, where)
    for path, known in _INNER.items():
        name, *inner = path.split(".")
        for index, value in enumerate(islice(_objects(given.get(name.removesuffix("[]"))), LIMITS.texts)):
            where, entry = name.replace("[]", f"[{index}]"), value
            for each in inner:
                where, entry = f"{where}.{each}", next(_objects(entry.get(each)), {})
            _note(found, entry, known, where)
    return found


def _objects(value: msgspec.Raw | None) -> Iterator[_Fields]:
    """An object, or the entries of a list, empty where they are something else; nothing of other values."""
    first = b"" if value is None else _head(value)[:1]
    if value is None or first not in (b"{", b"["):
        return
    if first == b"{":
        yield msgspec.json.decode(value, type=_Fields)
        return
    for each in msgspec.json.decode(value, type=list[msgspec.Raw]):
        yield msgspec.json.decode(each, type=_Fields) if _head(each)[:1] == b"{" else {}


def _note(found: dict[str, str], fields: _Fields, known: tuple[str, ...], where: str) -> None:
    if len(fields) > LIMITS.message_fields:
        allowed = f"up to {LIMITS.message_fields}"
        raise RequestError(f"{where} has {len(fields)} fields; allowed: {allowed}", param=where, code="too_many_values")
    for name, value in fields.items():
        if name not in known and name not in found and _head(value) not in _NOTHING:
            found[name] = f"{where}.{name}"


def _head(value: msgspec.Raw) -> bytes:
    """Enough of a value to know nothing and lists by: five bytes, without a copy of the rest."""
    return bytes(memoryview(value)[:5])


def _unknown_fault(path: str, kind: type[msgspec.Struct]) -> RequestError:
    close = get_close_matches(path, kind.__struct_fields__, n=1, cutoff=0.7) if "." not in path else []
    advice = f"did you mean {close[0]}?" if close else "leave it out, or start the server without --strict-fields"
    path = path[:_MAX_NAME_CHARS]
    return RequestError(f"the field {path!r} is not understood; {advice}", param=path, code="unknown_parameter")


def _type_fault(text: str) -> RequestError:
    path = _PATH.search(text)
    missing = _MISSING.search(text)
    where = path.group(1).lstrip(".") if path else ""
    what = text[: path.start()] if path else text
    if missing:
        where = f"{where}.{missing.group(1)}" if where else missing.group(1)
    if where.endswith(".role"):
        named = what.partition("enum value ")[2]
        what = f"there is no role {_cut(named)}" if named else what
        what += f"; allowed: {', '.join(ROLES)}"
    code = "missing_required_parameter" if missing else "invalid_type"
    # Messages are named one by one, as clients know them; of other lists the field is enough, the text says more.
    param = where if where.startswith("messages") else where.partition("[")[0]
    return RequestError(f"{where}: {what}" if where else what, param=param or None, code=code)


def _cut(text: str) -> str:
    """A value as an error shows it."""
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}…"


def _syntax_fault(body: bytes, text: str) -> RequestError:
    """NaN and infinities are no JSON; name the field anyway, since many encoders write them."""
    try:
        value = (
            json.loads(body, parse_constant=lambda _: _NON_FINITE, parse_int=lambda _: 0) if _is_short(body) else None
        )
    except (ValueError, RecursionError):
        value = None
    for name, entry in value.items() if isinstance(value, dict) else ():
        found = _non_finite(entry, name)
        if found is not None:
            return RequestError(f"{found} is not a finite number", param=found, code="invalid_value")
    return RequestError(f"the body is not valid JSON: {text}", code="invalid_json")


def _is_short(body: bytes) -> bool:
    return len(body) <= _MAX_RESCANNED_BYTES


def _non_finite(value: object, where: str) -> str | None:
    """The field with the first number that is none: of objectives the one, of other objects and lists the whole."""
    if value is _NON_FINITE:
        return _cut(where)
    if isinstance(value, dict):
        inner = (_non_finite(entry, f"slo.{name}" if where == "slo" else where) for name, entry in value.items())
    elif isinstance(value, list):
        inner = (_non_finite(entry, where) for entry in value)
    else:
        return None
    return next((found for found in inner if found is not None), None)
