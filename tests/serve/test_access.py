"""Around the endpoints: the access log, other origins, and paths, methods and roles that there are not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from typing import get_args
from urllib.parse import urlsplit

import pytest

from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.serve.openai import Role
from headway.text.chat import ROLES
from serve_harness import Harness, serving

ORIGIN = "https://app.example"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving() as harness:
        yield harness


def call(
    server: Harness, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        kind = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), {**kind, **(headers or {})})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def message(data: bytes) -> str:
    return str(json.loads(data)["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_one_line_per_request_when_it_has_ended(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "headway.serve.access"), serving() as server:
        response, _ = call(server, "POST", "/v1/chat/completions?key=secret", {**CHAT, "stream": stream})
    (record,) = [record for record in caplog.records if record.name == "headway.serve.access"]
    line = record.getMessage()
    name = re.escape(response.headers["x-request-id"])
    assert re.fullmatch(rf"127\.0\.0\.1 POST /v1/chat/completions 200 [\d.]+ ms {name} \d+\+3 tokens length", line)
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["completion_tokens"] == 3
    assert {"prompt_tokens", "cached_tokens", "finish", "queue_ms", "ttft_ms", "preemptions"} <= fields.keys()


def test_a_refused_request_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway.serve.access"), serving(api_key="k") as server:
        assert call(server, "GET", "/v1/models")[0].status == 401
    assert " GET /v1/models 401 " in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/chat/completion", "the nearest is POST /v1/chat/completions"),
        ("POST", "/chat/completions", "the nearest is POST /v1/chat/completions"),
        ("GET", "/v1/model", "the nearest is GET /v1/models"),
        ("GET", "/healthz", "the nearest is GET /health"),
        ("POST", "/v1/responses", "the nearest is POST /v1/chat/completions"),
        ("POST", "/v1/messages", "the nearest is POST /v1/chat/completions"),
        ("POST", "/v1/moderations", "'/v1/moderations'; GET /openapi.json"),
        ("GET", "/metrics/", "the nearest is GET /metrics"),
        ("GET", "/zzzzzzzzzzzzzzzzzzzzzzz", "GET /openapi.json lists what there is"),
    ],
)
def test_unknown_path_is_named_with_the_nearest(server: Harness, method: str, path: str, hint: str) -> None:
    response, data = call(server, method, path)
    assert (response.status, json.loads(data)["error"]["code"]) == (404, "unknown_path")
    assert f"there is no path {path!r}" in message(data)
    assert hint in message(data)


def test_wrong_method_names_those_that_are_allowed(server: Harness) -> None:
    response, data = call(server, "GET", "/v1/chat/completions")
    assert (response.status, response.headers["allow"]) == (405, "POST")
    assert message(data) == "GET is not allowed for '/v1/chat/completions'; allowed: POST"


def test_roles_of_requests_are_those_of_templates() -> None:
    assert get_args(Role) == ROLES


def test_unknown_role_lists_those_there_are(server: Harness) -> None:
    _, data = call(server, "POST", "/v1/chat/completions", {"messages": [{"role": "pirate", "content": "x"}]})
    assert "messages[0].role" in message(data)
    assert "'pirate'; allowed: system, developer, user, assistant, tool" in message(data)
    for wrong in ({"role": 5, "content": "x"}, {"role": None, "content": "x"}, {"content": "x"}):
        _, data = call(server, "POST", "/v1/chat/completions", {"messages": [wrong]})
        assert message(data).startswith("messages[0].role: ")
        assert message(data).endswith("; allowed: system, developer, user, assistant, tool")


def test_other_origins_are_let_in_if_named(server: Harness) -> None:
    asking = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    assert (
        call(server, "GET", "/v1/models", headers={"origin": ORIGIN})[0].headers["access-control-allow-origin"] is None
    )
    with serving(cors_origins=f"http://localhost:3000, {ORIGIN}", api_key="k") as open_server:
        response, _ = call(open_server, "OPTIONS", "/v1/chat/completions", headers=asking)
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        response, _ = call(open_server, "GET", "/v1/models", headers={"origin": ORIGIN})
        assert (response.status, response.headers["access-control-allow-origin"]) == (401, ORIGIN)
        key = {"authorization": "Bearer k"}
        response, _ = call(open_server, "POST", "/v1/chat/completions", {**CHAT, "a": 1}, {"origin": ORIGIN, **key})
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "x-headway-ignored" in response.headers["access-control-expose-headers"]
        response, _ = call(open_server, "GET", "/v1/models", headers={"origin": "https://evil.example", **key})
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, None)
    with serving(cors_origins="*") as any_server:
        response, _ = call(any_server, "GET", "/v1/models", headers={"origin": ORIGIN})
        assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origins", ["app.example", "https://app.example/path", "*, https://a.example", "ftp://a"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins is .*; allowed: \* or origins such as"):
        ServerConfig(cors_origins=origins)


def test_unknown_log_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_format is 'xml'; allowed: text, json"):
        ServerConfig(log_format="xml")
