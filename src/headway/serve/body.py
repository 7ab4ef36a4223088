"""From bytes on a connection to a typed request: size, encoding, JSON, types.

Every fault in a body leaves as a 4xx that names the field where there is one. Known fields that we cannot
honour and that would change the answer are refused here; unknown ones are ignored and logged once per name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headway.errors import RequestError
from headway.serve.problem import Problem

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key` in `)?\$(.*?)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_MAX_LOGGED_NAMES = 100
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


class BodyDecoder:
    """Decodes bodies to structs; remembers at most 100 unknown field names it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._fields: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, body: bytes, kind: type[T]) -> T:
        """The body as `kind`, or `RequestError`."""
        try:
            fields = self._fields.decode(body)
            self._refuse(fields, kind)
            return msgspec.json.decode(body, type=kind)
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
                self._log_unknown(name)
                continue
            value = msgspec.json.decode(fields[name])
            if value is not None and not is_harmless(value, fields):
                raise RequestError(
                    f"{name} is not supported by this server and would change the answer; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )

    def _log_unknown(self, name: str) -> None:
        if name in IGNORED or name in self._logged or len(self._logged) >= _MAX_LOGGED_NAMES:
            return
        self._logged.add(name)
        log.warning("unknown field %.64r is ignored", name)


def _type_fault(text: str) -> RequestError:
    path = _PATH.search(text)
    missing = _MISSING.search(text)
    where = path.group(1).lstrip(".") if path else ""
    what = text[: path.start()] if path else text
    if missing:
        where = f"{where}.{missing.group(1)}" if where else missing.group(1)
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
}

# Fields of OpenAI's that do not change the text of an answer.
IGNORED = frozenset(
    {
        "store",
        "metadata",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
    }
)
