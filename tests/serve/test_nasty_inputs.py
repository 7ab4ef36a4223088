"""Twenty nasty inputs over real HTTP, against processes: each gets its answer, and the engine does not notice.

After each: ready, the same engine process, every block free. Number 20, killing the engine, is tested elsewhere.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from raw_http import Raw, call, head, wait_for
from server_process import ServerProcess, server_process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = "secret"
AUTH = f"authorization: Bearer {KEY}"
HELLO = [{"role": "user", "content": "x"}]
CONTEXT = 100_000
POOL = 4096 * 16
VOCAB = 320
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("nasty")
    with server_process(folder, engine={"max_model_len": CONTEXT}, api_key=KEY, log_level="error") as made:
        yield made


@pytest.fixture(scope="module")
def slow(server: ServerProcess) -> Iterator[dict[str, tuple[Raw, float]]]:
    """Number 12, begun before all others: a head byte by byte, and half a body. Each with when it began."""
    body = Raw(server.url, timeout_s=60)
    body.send(head(TEXT, 100, AUTH) + b"{" * 50)
    begun = time.monotonic()
    dribbled = Raw(server.url, timeout_s=60)
    is_over = threading.Event()

    def drip() -> None:
        for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\n":
            try:
                dribbled.send(bytes([byte]))
            except OSError:
                return
            if is_over.wait(4):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    yield {"head": (dribbled, begun), "body": (body, begun)}
    is_over.set()
    thread.join()
    body.sock.close()
    dribbled.sock.close()


@pytest.fixture(autouse=True)
def same_engine(server: ServerProcess, slow: object) -> Iterator[None]:
    engine = server.engine()
    yield
    wait_for(lambda: ask(server, "GET", "/ready")[0] == 200)
    assert server.engine() == engine
    wait_for(lambda: metric(server, "headway_kv_blocks_free") == metric(server, "headway_kv_blocks_total"))
    assert metric(server, "headway_requests_running") == metric(server, "headway_requests_waiting") == 0


def metric(server: ServerProcess, name: str) -> float:
    page = ask(server, "GET", "/metrics")[1].decode()
    (line,) = [line for line in page.splitlines() if line.startswith(f"{name} ") or line.startswith(f"{name}{{")]
    return float(line.rpartition(" ")[2])


def ask(server: ServerProcess, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    status, told, _ = call(server.url, method, path, body, authorization=f"Bearer {KEY}", **headers)
    return status, told


def error(server: ServerProcess, path: str, body: object, status: int = 400) -> dict[str, Any]:
    got, told = ask(server, "POST", path, body)
    assert got == status, told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in told["error"]["message"]
    return dict(told["error"])


def best_of(times: int, work: Callable[[], object]) -> float:
    took = []
    for _ in range(times):
        begun = time.monotonic()
        work()
        took.append(time.monotonic() - begun)
    return min(took)


def chat(field: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": "x"}], ' + field.encode() + b"}"


def test_01_cut_json(server: ServerProcess) -> None:
    assert error(server, CHAT, b'{"model":')["code"] == "invalid_json"


def test_02_many_brackets(server: ServerProcess) -> None:
    assert best_of(5, lambda: error(server, CHAT, b"[" * 100_000)) < 0.05


@pytest.mark.parametrize("value", ["NaN", "1e999", '"inf"'])
def test_03_numbers_that_are_none(server: ServerProcess, value: str) -> None:
    assert error(server, CHAT, chat(f'"temperature": {value}'))["param"] == "temperature"


@pytest.mark.parametrize("value", ["true", '"8"', "1.0", str(10**9)])
def test_04_counts_that_are_none(server: ServerProcess, value: str) -> None:
    assert error(server, CHAT, chat(f'"n": {value}'))["param"] == "n"


def test_05_five_thousand_digits(server: ServerProcess) -> None:
    assert error(server, CHAT, chat('"max_tokens": ' + "9" * 5000))["param"] == "max_tokens"


def test_06_half_a_surrogate_pair(server: ServerProcess) -> None:
    error(server, CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')


def test_07_nul_is_kept(server: ServerProcess) -> None:
    body = {"prompt": "a\0b", "temperature": 0, "max_tokens": 3}
    status, told = ask(server, "POST", TEXT, body)
    assert (status, told["choices"][0]["text"], told["usage"]["prompt_tokens"]) == (200, "a\0b", 3)


@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [VOCAB]], ids=str)
def test_08_empty_prompts_and_foreign_tokens(server: ServerProcess, prompt: object) -> None:
    assert error(server, TEXT, {"prompt": prompt})["param"] == "prompt"
    assert error(server, CHAT, {"messages": []})["param"] == "messages"


@pytest.mark.parametrize("num_tokens", [CONTEXT + 1, POOL + 1])
def test_09_more_than_the_context_or_the_pool(server: ServerProcess, num_tokens: int) -> None:
    neighbour = Raw(server.url)
    body = json.dumps({"prompt": "abc", "temperature": 0, "max_tokens": 3000, "stream": True}).encode()
    neighbour.send(head(TEXT, len(body), AUTH) + body)
    told = error(server, TEXT, {"prompt": "a" * num_tokens})
    assert (told["code"], told["param"]) == ("context_length_exceeded", "prompt")
    status, _, events = neighbour.answer()
    text = "".join(json.loads(e[6:])["choices"][0]["text"] for e in events.decode().split("\n\n") if e[6:7] == "{")
    assert (status, text) == (200, "abc" * 1000)
    neighbour.sock.close()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_10_a_body_of_200_megabytes(server: ServerProcess, is_chunked: bool) -> None:
    with Raw(server.url) as raw:
        raw.send(
            head(CHAT, None, AUTH, "transfer-encoding: chunked") if is_chunked else head(CHAT, 200 * MEGABYTE, AUTH)
        )
        piece = b"100000\r\n" + b" " * MEGABYTE + b"\r\n" if is_chunked else b" " * MEGABYTE
        with suppress(OSError):  # it has closed
            for _ in range(200):
                raw.send(piece)
        status, headers, _ = raw.answer()
        assert (status, headers["connection"]) == (413, "close")


@pytest.mark.parametrize("kind", ["one of 8 MB", "10,000"])
def test_11_headers(server: ServerProcess, kind: str) -> None:
    lines = [f"x-{index}: y" for index in range(10_000)] if kind == "10,000" else ["x-a: " + "b" * 8 * MEGABYTE]

    def send() -> None:
        with Raw(server.url) as raw:
            with suppress(OSError):  # it has closed
                raw.send(head("/health", None, *lines, method="GET"))
            assert raw.sock.recv(12) == b"HTTP/1.1 431"

    assert best_of(3, send) < 1


def test_13_a_stream_that_is_not_read(server: ServerProcess) -> None:
    with Raw(server.url, receive_bytes=4096) as raw:
        body = json.dumps({"prompt": "abc", "temperature": 0, "max_tokens": 60_000, "stream": True}).encode()
        raw.send(head(TEXT, len(body), AUTH) + body)
        wait_for(lambda: metric(server, "headway_requests_running") == 1)
        wait_for(lambda: metric(server, "headway_requests_running") == 0, timeout_s=60)


@pytest.mark.parametrize(
    ("path", "headers", "statuses"),
    [
        ("/v1/models", {"host": "a/?x="}, {401}),
        ("//v1/models", {}, {401, 404}),
        ("/v1/../metrics", {}, {401, 404}),
        ("/v1/%2e%2e/metrics", {}, {401, 404}),
        ("/v1/models?key=secret", {}, {401}),
        ("/v1/models", {"authorization": "Bearer"}, {401}),
        ("/v1/models", {"authorization": "Bearer " + "s" * 30_000}, {401}),
        ("/v1/models", {"authorization": "Basic c2VjcmV0"}, {401}),
    ],
)
def test_14_paths_and_names_that_go_around_the_key(
    server: ServerProcess, path: str, headers: dict[str, str], statuses: set[int]
) -> None:
    assert call(server.url, "GET", path, **headers)[0] in statuses


def test_15_one_request_id_for_all(server: ServerProcess) -> None:
    answers: list[str] = [""] * 100

    def send(index: int) -> None:
        prompt = f"<{index}>"
        if index == 50:
            with Raw(server.url) as raw:
                body = json.dumps({"prompt": prompt, "max_tokens": 50_000}).encode()
                raw.send(head(TEXT, len(body), AUTH, "x-request-id: same") + body)
            return
        body = {"prompt": prompt, "temperature": 0, "max_tokens": len(prompt)}
        status, told = ask(server, "POST", TEXT, body, x_request_id="same")
        assert status == 200
        answers[index] = told["choices"][0]["text"]

    threads = [threading.Thread(target=send, args=(index,)) for index in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [f"<{index}>" if index != 50 else "" for index in range(100)]


DEEP = (
    b'{"type":"json_schema","json_schema":{"name":"x","schema":'
    + b'{"properties":{"a":' * 30_000
    + b"{}"
    + b"}}" * 30_000
    + b"}}"
)


@pytest.mark.parametrize(
    "schema",
    [
        DEEP,
        b'{"type":"json_schema","json_schema":{"name":"x","schema":{"$ref":"#"}}}',
        b'{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"string","pattern":"(a+)+$"}}}',
        b'{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"string","minLength":1000000000}}}',
    ],
    ids=["deep", "recursive", "pattern", "length"],
)
def test_16_schemas(server: ServerProcess, schema: bytes) -> None:
    """The engine of this server knows no grammars: what can be honoured is an answer by any tokens."""

    def body(schema: bytes) -> bytes:
        return b'{"max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "response_format": ' + schema + b"}"

    assert ask(server, "POST", CHAT, body(b'{"type":"json_object"}'))[0] == 200  # starts the process that checks
    if schema == DEEP:
        assert best_of(1, lambda: error(server, CHAT, body(schema))) < 2.5
    else:
        statuses: list[int] = []
        assert best_of(3, lambda: statuses.append(ask(server, "POST", CHAT, body(schema))[0])) < 2.5
        assert set(statuses) <= {200, 400}


def test_17_a_template_of_the_clients(server: ServerProcess) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    told = error(server, CHAT, {"messages": HELLO, "chat_template": loop})
    assert (told["param"], told["code"]) == ("chat_template", "unsupported_parameter")
    # As a variable of the model's own template it is text that nothing runs: the prompt is the same.
    bodies = (
        {"messages": HELLO, "max_tokens": 2, **more} for more in ({}, {"chat_template_kwargs": {"chat_template": loop}})
    )
    answers: list[Any] = []
    assert best_of(1, lambda: answers.extend(ask(server, "POST", CHAT, body) for body in bodies)) < 2.5
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["usage"] == answers[1][1]["usage"]


def test_18_stops(server: ServerProcess) -> None:
    for stop in ([""], ["x"] * 1000):
        assert error(server, TEXT, {"prompt": "x", "stop": stop})["param"] == "stop"
    ask_for = {"prompt": "abcdefgh", "temperature": 0, "max_tokens": 400, "stop": ["zz", "efg"]}  # a byte a token
    status, told = ask(server, "POST", TEXT, ask_for)
    assert (status, told["choices"][0]["text"], told["choices"][0]["finish_reason"]) == (200, "abcd", "stop")
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request("POST", TEXT, json.dumps({**ask_for, "stream": True}), {"authorization": f"Bearer {KEY}"})
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events if e[6:7] == "{") == "abcd"


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "file:///etc/passwd", "http://ok\\@evil/"])
def test_19_images_from_elsewhere(server: ServerProcess, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.05)
        for target in (url, f"http://127.0.0.1:{trap.getsockname()[1]}/"):
            part = {"type": "image_url", "image_url": {"url": target}}
            told = error(server, CHAT, {"messages": [{"role": "user", "content": [part]}]})
            assert told["code"] == "unsupported_content_part"
        with pytest.raises(TimeoutError):
            trap.accept()


def test_12_slow_heads_and_bodies_are_408(slow: dict[str, tuple[Raw, float]]) -> None:
    """Last, as it waits for those that were begun first."""
    for name, limit_s in (("head", 10), ("body", 30)):
        raw, begun = slow[name]
        assert raw.answer()[0] == 408
        if name == "body":
            assert limit_s - 1 < time.monotonic() - begun < limit_s + 30
