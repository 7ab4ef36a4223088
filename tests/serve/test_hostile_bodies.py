"""What one client sends costs itself: long texts, many values and slow templates do not hold up the others."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_engine import EchoEngine
from headway.errors import RequestError
from headway.serve.access import RefusedLines
from raw_http import Probe, call, in_background, wait_for
from serve_harness import Harness, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "x"}]
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving(EchoEngine(max_model_len=8192)) as harness:
        yield harness
        harness.wait_idle()


def many_messages(num: int) -> bytes:
    one = b'{"role":"user","content":"x"},'
    return b'{"messages":[' + (one * num)[:-1] + b"]}"


def chat_body(content: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def giant_bias() -> bytes:
    return b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(500_000)) + b"}}"


HOSTILE = {
    "text": (TEXT, lambda: json.dumps({"prompt": "word " * (7 * MEGABYTE // 5)}).encode(), "prompt"),
    "one word": (TEXT, lambda: json.dumps({"prompt": "a" * 7 * MEGABYTE}).encode(), "prompt"),
    "chat text": (CHAT, lambda: chat_body("a " * 3 * MEGABYTE), "messages"),
    "tokenize": ("/tokenize", lambda: json.dumps({"text": "a" * 7 * MEGABYTE}).encode(), "text"),
    "messages": (CHAT, lambda: many_messages(270_000), None),
    "some messages": (CHAT, lambda: many_messages(60_000), "messages"),
    "logit_bias": (TEXT, giant_bias, None),
    "fields": (TEXT, lambda: json.dumps({f"f{i}": i for i in range(400_000)}).encode(), None),
    "values": (TEXT, lambda: b'{"prompt":"x","y":[' + b"0," * (4 * MEGABYTE - 50) + b"0]}", None),
    "empty prompts": (TEXT, lambda: b'{"prompt":[' + b"[]," * (2 * MEGABYTE) + b"[]]}", None),
    "brackets": (TEXT, lambda: b'{"prompt":"x","y":[' + b"[[[[]]]]," * 900_000 + b"0]}", None),
    "token ids": (TEXT, lambda: b'{"prompt":[' + b"1," * (4 * MEGABYTE - 50) + b"1]}", "prompt"),
    "detokenize": ("/detokenize", lambda: json.dumps({"tokens": [70] * 250_000}).encode(), "tokens"),
    "lookup": ("/v1/cache/lookup", lambda: json.dumps({"tokens": [70] * 250_000}).encode(), "tokens"),
    "cut": (CHAT, lambda: many_messages(270_000)[:-2], None),
    "parts": (CHAT, lambda: chat_body([{"type": "text", "text": "x"}] * 60_000 + [{}]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_huge_body_is_refused_and_holds_up_nothing(server: Harness, name: str) -> None:
    path, make, param = HOSTILE[name]
    body = make()
    assert len(body) <= 8 * MEGABYTE
    longest, took = [], []
    for _ in range(8):  # the machine may be busy with something else; the server is not each time
        with Probe(server.url) as probe:
            begun = time.monotonic()
            status, told, _ = call(server.url, "POST", path, body)
            took.append(time.monotonic() - begun)
        assert status == 400
        assert told["error"]["type"] == "invalid_request_error"
        assert param is None or told["error"]["param"] == param
        longest.append(max(probe.times))
        if longest[-1] < 0.2 and took[-1] < 1:
            break
    print(f"{name}: {1e3 * min(took):.0f} ms, /health up to {1e3 * min(longest):.0f} ms")
    assert min(longest) < 0.2
    assert min(took) < 1


@pytest.mark.parametrize("name", ["chat text", "some messages", "logit_bias"])
def test_what_was_refused_is_not_kept_until_garbage_is_collected(server: Harness, name: str) -> None:
    def num_errors() -> int:
        return sum(issubclass(type(each), RequestError) for each in gc.get_objects())

    path, make, _ = HOSTILE[name]
    body = make()
    gc.collect()
    gc.disable()
    try:
        before = num_errors()
        for _ in range(3):
            assert call(server.url, "POST", path, body)[0] == 400
        wait_for(lambda: num_errors() <= before)
    finally:
        gc.enable()


def test_text_beyond_the_context_names_the_code(server: Harness) -> None:
    for path, body in ((TEXT, {"prompt": "ab " * 100_000}), ("/tokenize", {"text": "ab " * 100_000})):
        status, told, _ = call(server.url, "POST", path, body)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        assert "300000 characters" in told["error"]["message"]
    status, told, _ = call(server.url, "POST", CHAT, json.loads(many_messages(8193)))
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")


def test_as_many_token_ids_as_prompts_may_hold_are_taken(server: Harness) -> None:
    prompts = [[1 + index] * 8000 for index in range(64)]
    status, told, _ = call(server.url, "POST", TEXT, {"prompt": prompts, "max_tokens": 1, "temperature": 0})
    assert status == 200
    assert len(told["choices"]) == 64


def test_a_long_prompt_within_the_context_is_answered_and_counted(server: Harness) -> None:
    status, told, _ = call(server.url, "POST", TEXT, {"prompt": "a" * 8000, "max_tokens": 1, "temperature": 0})
    assert (status, told["usage"]["prompt_tokens"]) == (200, 8000)
    status, told, _ = call(server.url, "POST", "/tokenize", {"text": "a" * 50_000})
    assert (status, told["count"]) == (200, 50_000)


SLOW = (
    "{% for m in messages %}{% if m.content == 'slow' %}{% for i in range(60) %}{% endfor %}{% endif %}{% endfor %}fine"
)


def test_a_client_with_many_messages_does_not_delay_others() -> None:
    hogs = 8
    with serving(EchoEngine(max_model_len=100_000), template=SLOW) as server:
        ended: list[str] = []
        body = {"messages": [{"role": "user", "content": "slow"}] * 8000, "max_tokens": 1}

        def hog() -> None:
            assert call(server.url, "POST", CHAT, body)[0] == 200
            ended.append("hog")

        threads = [threading.Thread(target=hog) for _ in range(hogs)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            assert call(server.url, "POST", CHAT, {"messages": HELLO, "max_tokens": 1})[0] == 200
            ended.append("other")
        for thread in threads:
            thread.join()
    assert ended[-2:] == ["hog", "hog"]


def template_processes(server: Harness) -> list[int]:
    return [child._process.pid for child in server.template._children.idle]


def test_a_stopped_template_process_is_replaced_and_no_fault_of_the_request() -> None:
    with serving() as server:
        ask = {"messages": HELLO, "max_tokens": 1}
        assert call(server.url, "POST", CHAT, ask)[0] == 200
        (pid,) = template_processes(server)
        os.kill(pid, signal.SIGSTOP)
        status, told, headers = call(server.url, "POST", CHAT, ask)
        assert (status, told["error"]["type"], headers["retry-after"]) == (503, "service_unavailable_error", "1")
        assert not Path(f"/proc/{pid}").exists()
        assert call(server.url, "POST", CHAT, ask)[0] == 200


def test_a_template_that_never_ends_is_still_the_requests_fault() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with serving(template=loop) as server:
        status, told, _ = call(server.url, "POST", CHAT, {"messages": HELLO})
    assert (status, told["error"]["param"]) == (400, "messages")


def test_a_process_killed_while_it_renders_is_no_fault_of_the_request() -> None:
    with serving(EchoEngine(max_model_len=100_000), template=SLOW) as server:
        assert call(server.url, "POST", CHAT, {"messages": HELLO, "max_tokens": 1})[0] == 200
        (pid,) = template_processes(server)
        answers: list[int] = []
        body = {"messages": [{"role": "user", "content": "slow"}] * 50_000, "max_tokens": 1}
        os.kill(pid, signal.SIGSTOP)  # so that it does not end before
        with in_background(lambda: answers.append(call(server.url, "POST", CHAT, body)[0])):
            while not server.template._children._lent:
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
        assert answers == [503]


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain; charset=utf-8", "multipart/form-data; boundary=x", "image/png"]
)
def test_other_types_of_body_are_415(server: Harness, kind: str) -> None:
    status, told, _ = call(server.url, "POST", TEXT, {"prompt": "x"}, content_type=kind)
    assert (status, told["error"]["code"]) == (415, "unsupported_content_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"])
def test_json_by_any_name_is_taken(server: Harness, kind: str) -> None:
    assert call(server.url, "POST", TEXT, {"prompt": "x"}, content_type=kind)[0] == 200


def test_a_page_cannot_send_a_form(server: Harness) -> None:
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert call(server.url, "POST", TEXT, {"prompt": "x"}, **form)[0] == 200  # what curl calls any body
    assert call(server.url, "POST", TEXT, {"prompt": "x"}, **form, origin="http://evil.example")[0] == 415


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("a/?x=", 403),
        ("user@localhost", 403),
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1", 200),
        ("192.168.1.20:8000", 200),
        ("[::1]:8000", 200),
        ("llm.example:8000", 200),
        ("", 403),
    ],
)
def test_a_name_that_is_not_this_servers_is_403(host: str, status: int) -> None:
    with serving(allowed_hosts="llm.example") as server:
        assert call(server.url, "GET", "/v1/models", host=host)[0] == status
        assert call(server.url, "GET", "/health", host=host)[0] == 200


def test_the_host_name_is_allowed_and_a_star_allows_all() -> None:
    with serving() as server:
        assert call(server.url, "GET", "/v1/models", host=f"{os.uname().nodename}:80")[0] == 200
    with serving(allowed_hosts="*") as server:
        assert call(server.url, "GET", "/v1/models", host="evil.example")[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "x" * MEGABYTE, "content": "x"}]}),
        (TEXT, {"prompt": "x", "stop": ["y" * 20_000]}),
        (TEXT, {"prompt": "x", "service_tier": "z" * MEGABYTE}),
        (TEXT, {"prompt": "x", "model": "z" * MEGABYTE}),
        (TEXT, {"prompt": "x", "logit_bias": {"z" * 60_000: 1}}),
        (TEXT, {"prompt": "x", "slo": {"z" * 4000: 1}}),
    ],
    ids=lambda v: str(v)[:40],
)
def test_long_values_are_cut_in_errors(server: Harness, path: str, body: object) -> None:
    status, told, _ = call(server.url, "POST", path, body)
    assert status in (400, 404)
    assert len(json.dumps(told)) < 1500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"slo": {"ttft_ms": NaN}', "slo.ttft_ms"),
        ('"slo": {"itl_ms": 5, "deadline_ms": -Infinity}', "slo.deadline_ms"),
        ('"logit_bias": {"5": NaN}', "logit_bias"),
        ('"stop_token_ids": [1, Infinity]', "stop_token_ids"),
        ('"temperature": NaN', "temperature"),
    ],
)
def test_a_number_that_is_none_names_its_field(server: Harness, fields: str, param: str) -> None:
    status, told, _ = call(server.url, "POST", TEXT, b'{"prompt": "x", ' + fields.encode() + b"}")
    assert (status, told["error"]["param"], told["error"]["code"]) == (400, param, "invalid_value")


def test_refused_requests_make_so_many_lines_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serving() as server:
        for _ in range(400):
            assert call(server.url, "POST", TEXT, b"{")[0] == 400
        assert call(server.url, "GET", "/health")[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("headway.serve", "uvicorn"))]
    assert len(lines) < 250
    assert " GET /health 200 " in lines[-1]
    assert any("refused requests were left out" in line for line in lines)


def test_lines_come_back_with_time() -> None:
    now = [0.0]
    lines = RefusedLines(lambda: now[0])
    assert [lines.take(400) for _ in range(102)] == [0] * 100 + [None, None]
    assert lines.take(200) == 2
    assert lines.take(404) is None
    now[0] = 0.15
    assert lines.take(404) == 1
    assert lines.take(404) is None
    assert lines.take(500) == 1


@pytest.mark.parametrize("method", ["GET", "PATCH", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/config", "/admin/config", "//config", "/v1/config"])
def test_what_changes_a_server_is_on_no_port(server: Harness, path: str, method: str) -> None:
    before = dict(server.engine.settings)
    assert call(server.url, method, path, {"max_num_seqs": 1})[0] in (404, 405)
    assert server.engine.settings == before
