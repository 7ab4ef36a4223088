"""A field that is not understood is named: in a header, in the report, or, if the server is strict, in a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.serve.body import BodyDecoder
from headway.serve.openai import ChatRequest
from headway.serve.vectors import RerankRequest
from serve_harness import Harness, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    TEXT: {"prompt": "x", "max_tokens": 3},
}
SAID = "the field 'flavour' is not understood and was ignored"


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving() as harness:
        yield harness


@pytest.fixture(scope="module")
def strict() -> Iterator[Harness]:
    with serving(strict_fields=True) as harness:
        yield harness


def post(server: Harness, path: str, **fields: Any) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("POST", path, json.dumps({**BODIES.get(path, {}), **fields}))
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def events(data: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_header_and_report_name_it(server: Harness, path: str) -> None:
    response, data = post(server, path, flavour="mint", top_n=3)
    assert (response.status, response.headers["x-headway-ignored"]) == (200, "flavour, top_n")
    assert json.loads(data)["headway"]["warnings"] == [SAID, SAID.replace("flavour", "top_n")]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_names_it_in_its_first_chunk_or_in_the_report(server: Harness, path: str) -> None:
    response, data = post(server, path, flavour="mint", stream=True)
    assert response.headers["x-headway-ignored"] == "flavour"
    first, *others = events(data)
    assert first["headway"] == {"warnings": [SAID]}
    assert all("headway" not in event for event in others)
    response, data = post(server, path, flavour="mint", stream=True, stream_options={"include_usage": True})
    assert response.headers["x-headway-ignored"] == "flavour"
    *others, last = events(data)
    assert last["headway"]["warnings"] == [SAID]
    assert last["headway"]["total_ms"] > 0
    assert all("headway" not in event for event in others)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_said_about_what_is_understood(server: Harness, path: str, stream: bool) -> None:
    fields = {"user": "ann", "store": False, "metadata": {"a": "b"}, "flavour": None, "tools": [], "temperature": 0}
    response, data = post(server, path, stream=stream, **fields)
    assert (response.status, response.headers["x-headway-ignored"]) == (200, None)
    assert b"warnings" not in data


def test_fields_inside_messages_and_options_are_named_where_they_are(server: Harness) -> None:
    parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "y", "refusal": None, "annotations": [], "reasoning_details": "hm"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_details": "again"},
        {"role": "user", "content": "x"},
    ]
    options = {"include_usage": True, "include_obfuscation": True}
    response, _ = post(server, CHAT, messages=messages, stream=True, stream_options=options)
    expected = "messages[0].content[0].cache_control, messages[1].reasoning_details, stream_options.include_obfuscation"
    assert response.headers["x-headway-ignored"] == expected


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
        (
            CHAT,
            {"response_format": {"type": "text", "json_schema": {"mood": 1}}},
            "response_format.json_schema.mood",
        ),
        (
            CHAT,
            {"tools": [], "tool_choice": "none", "messages": [{"role": "user", "content": "x", "a": 1}]},
            "messages[0].a",
        ),
        (
            "/tokenize",
            {"text": "x", "stream_options": 5, "documents": 5},
            "stream_options, documents",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": ["a"]}]}, None),
    ],
)
def test_fields_inside_others_are_named_where_they_are(
    server: Harness, path: str, fields: dict[str, Any], names: str | None
) -> None:
    response, _ = post(server, path, **fields)
    assert (response.status, response.headers["x-headway-ignored"]) == (200 if names else 400, names)


def test_fields_of_tools_and_forms_are_looked_at() -> None:
    decoder = BodyDecoder()
    function = {"name": "f", "mood": 1, "parameters": {"mood": 3}}
    body = {
        "messages": [],
        "tools": [
            {"type": "function", "function": function},
            {"type": "function", "cached": 1, "function": {"name": "g"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "f", "sure": True}},
        "structured_outputs": {"regex": "a", "whitespace_pattern": "b"},
    }
    ignored = decoder.decode(json.dumps(body).encode(), ChatRequest).ignored
    assert ignored == [
        "structured_outputs.whitespace_pattern",
        "tools[1].cached",
        "tools[0].function.mood",
        "tool_choice.function.sure",
    ]
    ranked = {"query": "x", "documents": ["a", {"text": "b", "title": "c"}]}
    assert decoder.decode(json.dumps(ranked).encode(), RerankRequest).ignored == ["documents[1].title"]


def test_names_are_fit_for_a_header_and_few(server: Harness) -> None:
    response, data = post(server, TEXT, **{"a\r\nset-cookie: b": 1, "é" * 500: 2, **{f"f{i}": 3 for i in range(50)}})
    assert response.status == 200
    assert response.headers["set-cookie"] is None
    named = response.headers["x-headway-ignored"].split(", ")
    assert named[0] == "a__set-cookie_ b"
    assert len(named) == 17
    assert named[-1] == "36 more"
    assert len(json.loads(data)["headway"]["warnings"]) == 17


def test_other_endpoints_and_errors_name_it_too(server: Harness) -> None:
    response, _ = post(server, "/tokenize", text="x", flavour=1)
    assert (response.status, response.headers["x-headway-ignored"]) == (200, "flavour")
    response, _ = post(server, TEXT, temperature=9, flavour=1)
    assert (response.status, response.headers["x-headway-ignored"]) == (400, "flavour")


@pytest.mark.parametrize(
    ("path", "fields", "param", "hint"),
    [
        (CHAT, {"temprature": 0}, "temprature", "did you mean temperature?"),
        (TEXT, {"temprature": 0}, "temprature", "did you mean temperature?"),
        (TEXT, {"zzz": 0}, "zzz", "leave it out"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "leave it out"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "leave it out"),
    ],
)
def test_a_strict_server_refuses_it(strict: Harness, path: str, fields: dict[str, Any], param: str, hint: str) -> None:
    response, data = post(strict, path, **fields)
    error = json.loads(data)["error"]
    assert (response.status, error["param"], error["code"]) == (400, param, "unknown_parameter")
    assert param in error["message"]
    assert hint in error["message"]


def test_a_strict_server_takes_what_is_understood(strict: Harness) -> None:
    assert post(strict, CHAT, user="ann", metadata={"a": "b"}, tools=None, flavour=None)[0].status == 200
