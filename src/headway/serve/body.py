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
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from headway.errors import RequestError
from headway.serve.openai import ContentPart, Message, StreamOptions
from headway.serve.problem import Problem
from headway.text.chat import ROLES

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key` in `)?\$(.*?)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_MAX_LOGGED_NAMES = 100
_MAX_NAMED = 16
_MAX_NAME_CHARS = 64
_NOTHING = (b"null", b"[]", b"{}", b'""')  # clients repeat messages with all their empty fields
_Fields = dict[str, msgspec.Raw]

IGNORED = "headway.ignored"
"""Where a request's scope keeps the fields that were not understood."""
_NON_FINITE = object()


class ClientGone(Exception):
    """The client closed the connection; no response can be sent."""


async def read_body(request: Request, max_bytes: int, idle_s: float = 30.0) -> bytes:
    """The whole body, or 413, 415, 408."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Problem(415, f"content-encoding is {encoding[:32]!r}; allowed: none", code="unsupported_encoding")
    declared = request.headers.get("content-length", "0")
    too_large = Problem(
        413,
        f"the body is larger than {max_bytes} bytes, the most this server takes; send less",
        code="body_too_large",
        headers={"connection": "close"},
        is_body_unread=True,
    )
    if not (declared.isascii() and declared.isdigit()) or int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await request.receive()
        except TimeoutError:
            closing = {"connection": "close", "x-should-retry": "false"}
            raise Problem(408, f"no more of the body came for {idle_s:g} s", headers=closing) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


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

    def decode(self, body: bytes, kind: type[T]) -> Decoded[T]:
        """The body as `kind`, or `RequestError`."""
        try:
            fields = self._fields.decode(body)
            self._refuse(fields, kind)
            request = msgspec.json.decode(body, type=kind)
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
            if name not in kind.__struct_fields__ and name not in _SETTLED and _head(value) != b"null"
        ]
        paths = {name: name for name in names} | _inside(fields)
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


def _inside(fields: _Fields) -> dict[str, str]:
    """Fields inside messages and stream_options that no struct has, name -> path of the first; types are right."""
    found: dict[str, str] = {}
    options = fields.get("stream_options")
    if options is not None and _head(options) != b"null":
        _note(found, msgspec.json.decode(options, type=_Fields), StreamOptions, "stream_options")
    messages = fields.get("messages")
    if messages is None or _head(messages) == b"null":
        return found
    inner: dict[str, str] = {}
    for index, message in enumerate(msgspec.json.decode(messages, type=list[_Fields])):
        where = f"messages[{index}]"
        content = message.get("content")
        if content is not None and _head(content)[:1] == b"[":
            for at, part in enumerate(msgspec.json.decode(content, type=list[_Fields])):
                _note(inner, part, ContentPart, f"{where}.content[{at}]")
        _note(inner, message, Message, where)
    return inner | found


def _note(found: dict[str, str], fields: _Fields, kind: type[msgspec.Struct], where: str) -> None:
    for name, value in fields.items():
        if name not in kind.__struct_fields__ and name not in found and _head(value) not in _NOTHING:
            found[name] = f"{where}.{name}"


def _head(value: msgspec.Raw) -> bytes:
    """Enough of a value to know nothing and lists by: five bytes, without a copy of the rest."""
    return bytes(memoryview(value)[:5])


def _unknown_fault(path: str, kind: type[msgspec.Struct]) -> RequestError:
    close = get_close_matches(path, kind.__struct_fields__, n=1) if "." not in path else []
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
        what = f"there is no role {named}" if named else what
        what += f"; allowed: {', '.join(ROLES)}"
    code = "missing_required_parameter" if missing else "invalid_type"
    # Messages are named one by one, as clients know them; of other lists the field is enough, the text says more.
    param = where if where.startswith("messages") else where.partition("[")[0]
    return RequestError(f"{where}: {what}" if where else what, param=param or None, code=code)


def _syntax_fault(body: bytes, text: str) -> RequestError:
    """NaN and infinities are no JSON; name the field anyway, since many encoders write them."""
    try:
        value = json.loads(body, parse_constant=lambda _: _NON_FINITE, parse_int=lambda _: 0)
    except (ValueError, RecursionError):
        value = None
    for name, entry in value.items() if isinstance(value, dict) else ():
        if entry is _NON_FINITE:
            return RequestError(f"{name} is not a finite number", param=name, code="invalid_value")
    return RequestError(f"the body is not valid JSON: {text}", code="invalid_json")


def _is_false(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return value is False or value == []


def _is_true(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return value is True


def _is_never(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return False


def _is_idle_choice(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    # Without tools, which are refused by themselves, "auto" and "none" both mean a plain answer.
    return value in ("none", "auto")


def _is_text_format(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _is_text_only(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return bool(value == ["text"])


def _is_at_most_n(value: Any, fields: Mapping[str, msgspec.Raw]) -> bool:
    n = msgspec.json.decode(fields["n"]) if "n" in fields else 1
    # A wrong n is reported by its own field.
    return type(value) is int and value >= 1 and (type(n) is not int or value <= n)


def _is_blank(value: Any, _: Mapping[str, msgspec.Raw]) -> bool:
    return bool(value == "")


# Field -> whether a given value is what we do anyway.
REFUSED: Mapping[str, Callable[[Any, Mapping[str, msgspec.Raw]], bool]] = {
    "response_format": _is_text_format,
    "tools": _is_false,
    "tool_choice": _is_idle_choice,
    "functions": _is_false,
    "function_call": _is_idle_choice,
    "echo": _is_false,
    "suffix": _is_blank,
    "best_of": _is_at_most_n,
    "audio": _is_never,
    "modalities": _is_text_only,
    "prediction": _is_never,
    "chat_template": _is_never,
    "chat_template_kwargs": _is_never,
    "continue_final_message": _is_false,
    "web_search_options": _is_never,
    "use_beam_search": _is_false,
    "prompt_logprobs": _is_false,
    "bad_words": _is_false,
    "allowed_token_ids": _is_never,
    "structured_outputs": _is_never,
    "guided_json": _is_never,
    "guided_regex": _is_never,
    "guided_choice": _is_never,
    "guided_grammar": _is_never,
    "skip_special_tokens": _is_true,
    "add_generation_prompt": _is_true,
    "include_stop_str_in_output": _is_false,
    "return_token_ids": _is_false,
    "return_tokens_as_token_ids": _is_false,
}

# Fields of OpenAI's and vLLM's that do not change the text of an answer, and those that `REFUSED` has judged already.
_SETTLED = REFUSED.keys() | {
    "store",
    "metadata",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "spaces_between_special_tokens",  # which are not shown
}
