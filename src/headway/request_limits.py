"""The bounds of one request, in one table: HTTP checks them on arrival, the engine checks its part of them again.

Standard library only and importable by all. It knows numbers, not who checks them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may bring; `ServerConfig` can change the three that have flags."""

    body_bytes: int = 8 * 1024 * 1024
    head_bytes: int = 32 * 1024
    headers: int = 100
    head_s: float = 10.0  # from the first byte of a request to the end of its head
    body_s: float = 30.0  # for the whole body, and a second more for each `body_rate` bytes that have come
    body_rate: int = 64 * 1024  # bytes per second: slower bodies are given up on
    send_s: float = 30.0  # how long a client may leave an answer unread
    linger_s: float = 2.0  # for the rest of a body whose answer is out already
    fields: int = 1024  # of the body's object
    values: int = 256 * 1024  # of the whole body: commas and opening brackets, those inside texts included
    message_fields: int = 64
    n: int = 16
    prompts: int = 64
    texts: int = 2048  # that one request wants vectors of
    texts_tokens: int = 300_000  # of all of them together
    stops: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 64
    logprobs: int = 20
    logit_bias: int = 1024
    salt_chars: int = 128
    tenant_chars: int = 128
    priority: int = 100  # either way
    functions: int = 128  # that a request offers
    function_name_chars: int = 64
    grammar_chars: int = 256 * 1024  # of a grammar as text


LIMITS = RequestLimits()
