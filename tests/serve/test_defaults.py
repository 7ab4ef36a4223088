"""Fields that a request leaves out: the model's sampling values, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from echo_engine import EchoEngine
from headway.config import SamplingConfig
from headway.text.defaults import SamplingDefaults
from serve_harness import Harness, serving

DEFAULTS = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving(defaults=DEFAULTS) as harness:
        yield harness


def call(server: Harness, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        found: dict[str, Any] = json.loads(response.read())
        return found
    finally:
        connection.close()


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_values_that_a_request_does_not_give_are_the_models(server: Harness, path: str, body: dict[str, Any]) -> None:
    call(server, path, {**body, "top_p": None})
    params = server.engine.submits[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 40)
    assert (params.min_p, params.repetition_penalty) == (0.05, 1.1)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_values_of_the_request_win(server: Harness, path: str, body: dict[str, Any]) -> None:
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    call(server, path, {**body, **neutral})
    params = server.engine.submits[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (1, 1, 0)
    assert (params.min_p, params.repetition_penalty) == (0, 1)


def test_an_answer_without_a_length_ends_by_length() -> None:
    with serving(EchoEngine(max_model_len=4096)) as server:
        answer = call(server, "/v1/chat/completions", {"messages": CHAT["messages"]})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1024
        answer = call(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3500}]})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 4096
        longer = call(server, "/v1/chat/completions", {"messages": CHAT["messages"], "max_tokens": 2000})
        assert longer["usage"]["completion_tokens"] == 2000
        assert call(server, "/v1/completions", {"prompt": "x"})["usage"]["completion_tokens"] == 16
        assert call(server, "/v1/models")["data"][0]["default_sampling"]["max_tokens"] == 1024


def test_the_length_of_such_an_answer_is_an_option() -> None:
    defaults = SamplingDefaults.of({}, SamplingConfig(default_max_tokens=40))
    with serving(defaults=defaults) as server:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            answer = call(server, path, {**body, "max_tokens": None})
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (40, "length")
        atleast = call(server, "/v1/completions", {"prompt": "x", "min_tokens": 50})
        assert atleast["usage"]["completion_tokens"] == 50
        assert call(server, "/v1/models")["data"][0]["default_sampling"]["max_tokens"] == 40


def test_models_show_them(server: Harness) -> None:
    expected = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    for card in (call(server, "/v1/models")["data"][0], call(server, "/v1/models/echo")):
        assert card["default_sampling"].items() >= expected.items()
