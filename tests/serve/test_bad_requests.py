"""Whatever a client sends, the answer is a 4xx that names the fault, and the server goes on."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from echo_engine import EchoEngine
from headway.serve.protocol import BoundedProtocol
from serve_harness import Harness, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving(EchoEngine(max_model_len=128), max_body_bytes=256 * 1024) as harness:
        yield harness
        harness.wait_idle()
        assert harness.do(harness.client.stats).finished.get("error") is None


class ServedAnswer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.raw = response.read()

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not re.search(r"0x[0-9a-f]{6,}|Traceback|/src/|site-packages", error["message"])
        return error


def send(
    server: Harness, path: str, body: bytes | None, method: str = "POST", headers: dict[str, str] | None = None
) -> ServedAnswer:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
        answer = ServedAnswer(connection.getresponse())
    finally:
        connection.close()
    assert answer.headers["x-request-id"]
    return answer


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "echo", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"model": "echo", "prompt": "x", "max_tokens": 4, **fields}).encode()


def raw_chat(field: str) -> bytes:
    return b'{"model": "echo", "messages": [{"role": "user", "content": "x"}], ' + field.encode() + b"}"


NUMBERS = [
    ("n", "true"),
    ("n", '"8"'),
    ("n", "1.0"),
    ("n", "1.5"),
    ("n", "0"),
    ("n", "-1"),
    ("n", "17"),
    ("n", "1000000000"),
    ("max_tokens", "0"),
    ("max_tokens", "-5"),
    ("max_tokens", "true"),
    ("max_tokens", "2.0"),
    ("max_tokens", '"5"'),
    ("max_tokens", "9" * 5000),
    ("max_tokens", "9" * 4300),
    ("max_tokens", "9" * 4299),
    ("max_tokens", "9" * 40),
    ("max_tokens", "9223372036854775807"),
    ("seed", "9" * 4300),
    ("n", "9" * 4300),
    ("priority", "-" + "9" * 4300),
    ("stop_token_ids", "[" + "9" * 4300 + "]"),
    ("temperature", "9" * 4300),
    ("logit_bias", '{"' + "9" * 4300 + '": 1}'),
    ("max_tokens", "9223372036854775808"),
    ("max_completion_tokens", "0"),
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "1e999"),
    ("temperature", '"inf"'),
    ("temperature", "-0.1"),
    ("temperature", "2.1"),
    ("temperature", "true"),
    ("temperature", "[1]"),
    ("top_p", "0"),
    ("top_p", "1.01"),
    ("top_p", "-1"),
    ("top_p", '"1"'),
    ("top_k", "-2"),
    ("top_k", "1.0"),
    ("min_p", "1.1"),
    ("repetition_penalty", "0"),
    ("repetition_penalty", "1e-38"),  # a logit divided by it is no float32
    ("presence_penalty", "2.1"),
    ("frequency_penalty", "-2.1"),
    ("dry_multiplier", "-1"),
    ("dry_base", "0.5"),
    ("dry_allowed_length", "0"),
    ("dry_penalty_last_n", "0"),
    ("dry_allowed_length", "2147483648"),
    ("dry_penalty_last_n", "-2"),
    ("dry_penalty_last_n", "2147483648"),
    ("dry_sequence_breakers", '[""]'),
    ("dry_sequence_breakers", '["a"' + ',"a"' * 20 + "," + ",".join(f'"{n}"' for n in range(17)) + "]"),
    ("xtc_probability", "1.1"),
    ("xtc_threshold", "0.51"),
    ("seed", "1.0"),
    ("seed", "36893488147419103232"),
    ("min_tokens", "-1"),
    ("top_logprobs", "5"),
    ("priority", "9223372036854775807"),
    ("stop", '""'),
    ("stop", '["a", ""]'),
    ("stop", "[1]"),
    ("stop", json.dumps(["a"] * 17)),
    ("stop", json.dumps("a" * 257)),
    ("stop_token_ids", "[-1]"),
    ("stop_token_ids", "[320]"),
    ("stop_token_ids", "[true]"),
    ("logit_bias", '{"320": 1}'),
    ("logit_bias", '{"-1": 1}'),
    ("logit_bias", '{"a": 1}'),
    ("logit_bias", '{"1": 101}'),
    ("logit_bias", '{"1": "1"}'),
    ("logit_bias", "[]"),
    ("stream", "1"),
    ("stream", '"true"'),
    ("ignore_eos", "0"),
    ("logprobs", "1"),
    ("cache_salt", '""'),
    ("cache_salt", '"a b"'),
    ("stream_options", '{"include_usage": true}'),
    ("user", "5"),
    ("model", "5"),
]


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=lambda v: str(v)[:24])
def test_wrong_value_names_its_field(server: Harness, name: str, value: str) -> None:
    answer = send(server, CHAT, raw_chat(f'"{name}": {value}'))
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == name


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        (b'{"model":', "invalid_json", None),
        (b"", "invalid_json", None),
        (b"nonsense", "invalid_json", None),
        (b'{"model": "echo"} trailing', "invalid_json", None),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid_json", None),
        (b'{"messages": [{"role": "user", "content": "a"}], "mood": "\xff"}', "invalid_json", None),
        (raw_chat('"x": ' + "[" * 100_000), "invalid_json", None),
        (raw_chat('"metadata": ' + '{"a":' * 50_000), "invalid_json", None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", None),
        (b'{"messages": [{"role": "user", "content": "\\ud800 and more"}]}', "invalid_json", None),
        (b"[" * 100_000, "invalid_type", None),
        (b"null", "invalid_type", None),
        (b"{}", "missing_required_parameter", "messages"),
        (b'{"messages": []}', None, "messages"),
        (b'{"messages": {}}', "invalid_type", "messages"),
        (b'{"messages": [{}]}', "missing_required_parameter", "messages[0].role"),
    ],
    ids=lambda v: str(v)[:32],
)
def test_broken_body(server: Harness, value: bytes, code: str | None, param: str | None) -> None:
    begun = time.monotonic()
    answer = send(server, CHAT, value)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (code, param)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "pirate", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]},
            ],
            "messages[1].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "refuse"}], "messages"),
    ],
    ids=lambda v: str(v)[:48],
)
def test_bad_message_is_named(server: Harness, messages: object, param: str) -> None:
    answer = send(server, CHAT, chat(messages=messages))
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        [-1],
        [320],
        [10**4000],
        [[10**4000]],
        [[1], [320]],
        [True],
        [1.0],
        ["a", 1],
        ["a", [1]],
        {},
        None,
        5,
        ["a"] * 65,
    ],
    ids=lambda v: str(v)[:24],
)
def test_bad_prompt_names_prompt(server: Harness, prompt: object) -> None:
    answer = send(server, TEXT, text(prompt=prompt))
    assert answer.status == 400
    assert answer.error["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(response_format={"type": "json_object"})),  # this server checks no grammars
        (CHAT, chat(guided_json={"type": "object"})),
        (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}])),
        (CHAT, chat(tool_choice="required")),
        (CHAT, chat(functions=[{"name": "f"}])),
        (CHAT, chat(function_call={"name": "f"})),
        (CHAT, chat(audio={"voice": "alloy", "format": "wav"})),
        (CHAT, chat(modalities=["text", "audio"])),
        (CHAT, chat(prediction={"type": "content", "content": "x"})),
        (CHAT, chat(chat_template="{{ 1 }}")),
        (TEXT, text(chat_template_kwargs={"a": 1})),
        (CHAT, chat(web_search_options={})),
        (CHAT, chat(skip_special_tokens=False)),
        (TEXT, text(add_generation_prompt=False)),
        (TEXT, text(continue_final_message=True)),
        (TEXT, text(tools=[{"type": "function", "function": {"name": "f"}}])),
        (TEXT, text(tool_choice="required")),
        (CHAT, chat(thinking_token_budget=4)),
        (CHAT, chat(include_stop_str_in_output=True)),
        (CHAT, chat(return_token_ids=True)),
        (CHAT, chat(return_tokens_as_token_ids=True)),
        (CHAT, chat(echo=True)),
        (TEXT, text(suffix="x")),
        (CHAT, chat(best_of=2)),
        (CHAT, chat(best_of=3, n=2)),
    ],
    ids=lambda v: str(v)[80:120],
)
def test_field_that_cannot_be_honoured_is_refused_by_name(server: Harness, path: str, body: bytes) -> None:
    name = next(key for key in json.loads(body) if key not in ("model", "messages", "prompt", "max_tokens", "n"))
    answer = send(server, path, body)
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(response_format={"type": "text"}, max_tokens=3)),
        (CHAT, chat(tools=[], tool_choice="auto", functions=None, modalities=["text"], max_tokens=3)),
        (CHAT, chat(tool_choice="none", store=False, metadata={"a": "b"}, user="me", max_tokens=3)),
        (CHAT, chat(max_tokens=3, temperature=None, stop=None, n=None, stream=None, logit_bias=None, top_k=-1)),
        (CHAT, chat(max_tokens=3, temperature=0, top_p=1, messages=[{"role": "user", "content": "a\0b"}])),
        (TEXT, text(echo=False, suffix=None, best_of=1)),
        (TEXT, text(best_of=2, n=2)),
        (TEXT, text(made_up_field=[1, 2, {"a": None}])),
    ],
)
def test_harmless_fields_are_taken(server: Harness, path: str, body: bytes) -> None:
    assert send(server, path, body).status == 200


def test_prompt_beyond_the_context_names_both_numbers(server: Harness) -> None:
    for body, path, param in (
        (text(prompt="y" * 128), TEXT, "prompt"),
        (chat(messages=[{"role": "user", "content": "y" * 200}]), CHAT, "messages"),
    ):
        error = send(server, path, body).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "128" in error["message"]
    assert "207" in error["message"]


def test_a_sliding_window_is_called_one() -> None:
    engine = EchoEngine(max_model_len=128)
    engine.info = replace(engine.info, sliding_window=128)
    with serving(engine) as server:
        for body in (text(prompt="y" * 128), text(prompt="y" * 100, max_tokens=29)):
            assert "this model's context is 128 tokens, its sliding window" in send(server, TEXT, body).error["message"]


def test_prompt_plus_answer_beyond_the_context_is_refused(server: Harness) -> None:
    answer = send(server, TEXT, text(prompt="y" * 100, max_tokens=29))
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "max_tokens")
    assert send(server, TEXT, text(prompt="y" * 100, max_tokens=28)).status == 200


def test_unknown_model_is_404(server: Harness) -> None:
    for path, body in ((CHAT, chat(model="gpt-4")), (TEXT, text(model="")), ("/tokenize", b'{"model":"a","text":"b"}')):
        answer = send(server, path, body)
        assert answer.status == 404
        assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")


def test_unknown_path_and_method(server: Harness) -> None:
    for path in ("/v1", "/v1/nothing", "/v1/models/", "//v1/models", "/health/", "/v1/../metrics"):
        answer = send(server, path, None, "GET")
        assert answer.status == 404, path
        assert answer.error["type"] == "invalid_request_error"
    answer = send(server, CHAT, None, "GET")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.error["code"] == "bad_method"


def test_large_body_is_413(server: Harness) -> None:
    answer = send(server, CHAT, b" " * (256 * 1024 + 1))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    chunks = iter([b" " * 65536] * 8)
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    connection.request("POST", CHAT, chunks, encode_chunked=True, headers={"transfer-encoding": "chunked"})
    assert connection.getresponse().status == 413
    connection.close()


def test_compressed_body_is_415(server: Harness) -> None:
    answer = send(server, CHAT, chat(), headers={"content-encoding": "gzip"})
    assert answer.status == 415
    assert answer.error["type"] == "invalid_request_error"


def test_large_heads_are_431(server: Harness) -> None:
    assert send(server, "/health", None, "GET", {"x-a": "b" * 20_000}).status == 200
    for extra in (b"x-a: " + b"b" * 200_000 + b"\r\n", b"".join(b"x-%d: y\r\n" % i for i in range(10_000))):
        with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), 10) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + extra + b"\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 431 ")


def test_slow_head_is_408(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.05)
    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), 10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhos")
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")


def test_large_body_is_read_away_so_that_the_client_sees_the_answer(server: Harness) -> None:
    answer = send(server, CHAT, b" " * (32 * 1024 * 1024))
    assert answer.status == 413


def test_what_is_no_http_is_400(server: Harness) -> None:
    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), 10) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


def test_request_id_is_ours_or_a_sane_one_of_the_client(server: Harness) -> None:
    def id_for(asked: str) -> str:
        return send(server, "/health", None, "GET", {"X-Request-Id": asked}).headers["x-request-id"]

    assert id_for("abc-123") == "abc-123"
    for insane in ("a b", "x" * 129, "a;b", "é"):
        assert id_for(insane).startswith("req-")


def test_tokenize_and_detokenize(server: Harness) -> None:
    answer = send(server, "/tokenize", '{"text": "hé"}'.encode())
    assert json.loads(answer.raw) == {"count": 3, "max_model_len": 128, "tokens": [105, 196, 170]}
    assert json.loads(send(server, "/tokenize", b'{"prompt": "a"}').raw)["tokens"] == [98]
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert json.loads(send(server, "/tokenize", body).raw)["count"] == len("user: a\n")
    assert json.loads(send(server, "/detokenize", b'{"tokens": [105, 196, 170]}').raw)["text"] == "hé"
    assert json.loads(send(server, "/detokenize", b'{"tokens": []}').raw)["text"] == ""
    for path, body, param in (
        ("/tokenize", b"{}", "text"),
        ("/tokenize", b'{"text": "a", "prompt": "b"}', "text"),
        ("/tokenize", b'{"messages": []}', "messages"),
        ("/detokenize", b'{"tokens": [320]}', "tokens"),
        ("/detokenize", b'{"tokens": [-1]}', "tokens"),
        ("/detokenize", b'{"tokens": [99999999999999999999]}', "tokens"),
        ("/detokenize", b'{"tokens": "a"}', "tokens"),
        ("/detokenize", b"{}", "tokens"),
    ):
        answer = send(server, path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


def test_documents_and_numbers(server: Harness) -> None:
    document = json.loads(send(server, "/openapi.json", None, "GET").raw)
    assert document["openapi"] == "3.1.0"
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]
    version = json.loads(send(server, "/version", None, "GET").raw)
    assert version.pop("version")
    assert version.pop("debug_kv") is False
    assert version.pop("speculation") == "off"
    assert version == server.engine.info.computes_with()
    before = _series(server)
    for index in range(30):
        send(server, f"/v1/models/random-{index}", None, "GET")
        send(server, CHAT, chat(model=f"random-{index}"))
    after = _series(server)
    assert after == before
    for name in (
        "headway_requests_running",
        "headway_requests_waiting",
        "headway_kv_blocks_total",
        "headway_kv_blocks_free",
        "headway_preemptions_total",
        "headway_tokens_computed_total",
        "headway_tokens_generated_total",
        'headway_requests_total{finish="length"}',
        "headway_time_to_first_token_seconds_count",
        "headway_inter_token_seconds_count",
        "headway_request_seconds_count",
    ):
        assert name in after


def _series(server: Harness) -> set[str]:
    page = send(server, "/metrics", None, "GET").raw.decode()
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}
