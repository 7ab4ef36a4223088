"""Requests as clients of other projects send them (`tools/clients` runs those): a strict server takes them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from serve_harness import Harness, serving

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
USER = [{"role": "user", "content": "x"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PLAIN = {"frequency_penalty": 0, "logprobs": None, "n": 1, "presence_penalty": 0, "seed": None, "top_p": 1}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (CHAT, {"messages": USER, "max_tokens": 9, "n": 2, "seed": 1, "logprobs": True, "top_logprobs": 2}),
    "openai, streamed": (CHAT, {"messages": USER, "max_tokens": 9, "temperature": 0, **USAGE}),
    "langchain": (CHAT, {"messages": USER, "max_completion_tokens": 9, "temperature": 0.0, "stream": False}),
    "langchain, text": (TEXT, {"prompt": ["x"], "max_tokens": 9, "temperature": 0.0, **PLAIN}),
    "langchain, text streamed": (TEXT, {"prompt": "x", "max_tokens": 9, "temperature": 0.0, "stream": True, **PLAIN}),
    "guidellm": (CHAT, {"messages": PARTS, "max_completion_tokens": 9, "ignore_eos": True, **CONTINUOUS}),
    "guidellm, text": (TEXT, {"prompt": "x", "max_tokens": 9, "stop": None, "ignore_eos": True, **CONTINUOUS}),
    "vllm": (CHAT, {"messages": PARTS, "max_completion_tokens": 9, "ignore_eos": True, **USAGE}),
    "vllm, text": (
        TEXT,
        {"prompt": "x", "max_tokens": 9, "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, **USAGE},
    ),
    "vllm, tokens": (TOKENIZE, {"prompt": "x", "add_special_tokens": False}),
    "what vllm does by default": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 9,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "add_generation_prompt": True,
            "include_stop_str_in_output": False,
            "return_tokens_as_token_ids": False,
            "return_token_ids": False,
        },
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving(strict_fields=True) as harness:
        yield harness


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_a_strict_server_takes_it_and_counts_its_tokens(server: Harness, path: str, body: dict[str, Any]) -> None:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("POST", path, json.dumps({"model": "echo", **body}))
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    assert response.status == 200, data
    assert response.headers["x-headway-ignored"] is None
    if not body.get("stream"):
        said = json.loads(data)
    else:
        *chunks, said = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        finishes = [choice["finish_reason"] for chunk in [*chunks, said] for choice in chunk["choices"]]
        assert finishes[-1] == "length"
    if path != TOKENIZE and (not body.get("stream") or "stream_options" in body):
        assert said["usage"]["completion_tokens"] == 9 * body.get("n", 1)
