"""Every row of the table of limits, over HTTP: one beyond it is refused, at once and by name; the limit is not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from echo_engine import EchoEngine
from headway.request_limits import LIMITS, RequestLimits
from raw_http import Raw, call, head
from serve_harness import Harness, serving

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving(EchoEngine(max_model_len=4096, vocab_size=2000)) as harness:
        yield harness


def fields_of(**given: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1, **given}).encode()


def message(num_fields: int) -> bytes:
    extra = {f"f{index}": 1 for index in range(num_fields - 2)}
    return json.dumps({"messages": [{"role": "user", "content": "x", **extra}], "max_tokens": 1}).encode()


# Limit -> the field an error names, and a body with so much of it.
BODIES: dict[str, tuple[str | None, Callable[[int], bytes]]] = {
    "body_bytes": (None, lambda most: fields_of().ljust(most)),
    "fields": (None, lambda most: fields_of(**{f"f{index}": 1 for index in range(most - 2)})),
    "values": (None, lambda most: fields_of(y=[0] * (most - 3))),
    "message_fields": ("messages[0]", message),
    "n": ("n", lambda most: fields_of(n=most)),
    "prompts": ("prompt", lambda most: fields_of(prompt=["x"] * most)),
    "stops": ("stop", lambda most: fields_of(stop=["y"] * most)),
    "stop_chars": ("stop", lambda most: fields_of(stop="y" * most)),
    "stop_token_ids": ("stop_token_ids", lambda most: fields_of(stop_token_ids=[7] * most)),
    "logprobs": ("logprobs", lambda most: fields_of(logprobs=most)),
    "logit_bias": ("logit_bias", lambda most: fields_of(logit_bias={str(token): -100 for token in range(most)})),
    "salt_chars": ("cache_salt", lambda most: fields_of(cache_salt="s" * most)),
    "priority": ("priority", lambda most: fields_of(priority=most)),
}
# Of what comes before a body, and of time: tested with connections.
HEADS = {"head_bytes", "headers"}
TIMES = {"head_s", "body_s", "body_rate", "send_s", "linger_s"}
CUT = {"tenant_chars"}  # a longer one is not refused: its digest stands for it

# tests/serve/test_structure.py and test_tools.py: they take a server that knows grammars
OF_GRAMMARS = {"grammar_chars", "functions", "function_name_chars"}
# tests/serve/test_embeddings.py, with a model that makes vectors
OF_VECTORS = {"texts", "texts_tokens"}


def test_the_table_has_a_test_for_each_of_its_rows() -> None:
    assert {
        field.name for field in fields(RequestLimits)
    } == BODIES.keys() | HEADS | TIMES | CUT | OF_GRAMMARS | OF_VECTORS


@pytest.mark.parametrize("name", BODIES)
def test_one_beyond_a_limit_is_refused_at_once_and_the_limit_itself_is_not(server: Harness, name: str) -> None:
    param, make = BODIES[name]
    path = "/v1/chat/completions" if b'"messages"' in make(4) else TEXT
    most = getattr(LIMITS, name)
    status, told, _ = call(server.url, "POST", path, make(most))
    assert status == 200, told
    body, took = make(most + 1), []
    for _ in range(5):
        begun = time.monotonic()
        status, told, _ = call(server.url, "POST", path, body)
        took.append(time.monotonic() - begun)
        assert status == (413 if name == "body_bytes" else 400)
        assert told["error"]["param"] == param
    assert min(took) < 0.1, "it was not refused at once"
    server.wait_idle()


@pytest.mark.parametrize(
    "value", ["min-1", "max+1", "NaN", "Infinity", "-0.5", "2147483648", "9223372036854775808", "true", '"1"', "[]"]
)
@pytest.mark.parametrize("name", ["n", "logprobs", "priority", "max_tokens", "min_tokens", "top_k", "seed"])
def test_wrong_numbers_name_their_field(server: Harness, name: str, value: str) -> None:
    bounds = {"n": (1, LIMITS.n), "logprobs": (0, LIMITS.logprobs), "priority": (-LIMITS.priority, LIMITS.priority)}
    low, high = bounds.get(name, (None, None))
    if value in ("min-1", "max+1"):
        if low is None or high is None:
            return
        value = str(low - 1 if value == "min-1" else high + 1)
    if name in ("seed", "top_k", "max_tokens", "min_tokens") and value == "2147483648":
        value = "9223372036854775808"
    body = b'{"prompt": "x", "%b": %b}' % (name.encode(), value.encode())
    status, told, _ = call(server.url, "POST", TEXT, body)
    assert (status, told["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    "lines",
    [
        ["x-a: " + "b" * (LIMITS.head_bytes + 1)],
        [f"x-{index}: b" for index in range(LIMITS.headers + 1)],
    ],
    ids=["head_bytes", "headers"],
)
def test_a_head_beyond_its_limit_is_431(server: Harness, lines: list[str]) -> None:
    with Raw(server.url) as raw:
        raw.send(head("/health", None, *lines, method="GET"))
        assert raw.answer()[0] == 431


def test_a_long_user_is_kept_by_its_digest(server: Harness) -> None:
    for size, kept in ((LIMITS.tenant_chars, LIMITS.tenant_chars), (LIMITS.tenant_chars + 1, len("user-") + 16)):
        assert call(server.url, "POST", TEXT, fields_of(user="u" * size))[0] == 200
        assert len(server.engine.submits[-1].tenant) == kept
