"""Clients that leave, engines that die, servers that load, drain or are full: clients' errors, and what is freed."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from echo_engine import EchoEngine
from serve_harness import Harness, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Valve:
    """Lets an engine step only while it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.num_steps = 0

    def __call__(self) -> None:
        assert self._open.wait(20)
        self.num_steps += 1

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


def post(server: Harness, path: str, body: dict[str, Any], **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    connection.request("POST", path, json.dumps({"model": "echo", **body}), headers)
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response, raw


def get(server: Harness, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response, raw


@contextmanager
def sdk(server: Harness, key: str = "any") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def raw_request(server: Harness, body: dict[str, Any], receive_bytes: int | None = None) -> socket.socket:
    data = json.dumps({"model": "echo", "prompt": "abc", "temperature": 0, **body}).encode()
    sock = socket.socket()
    sock.settimeout(20)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
    head = f"POST {TEXT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def wait_for(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)  # a tight loop would keep the interpreter from the server it waits for


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", ["queued", "running"])
def test_client_that_leaves_frees_its_request(moment: str, is_stream: bool, is_reset: bool) -> None:
    engine = EchoEngine(slots=1, max_model_len=2_000_000, num_blocks=200_000)
    with serving(engine) as server:
        first = raw_request(server, {"max_tokens": 1_000_000, "stream": True})
        first.recv(100)
        sock = first
        if moment == "queued":
            sock = raw_request(server, {"max_tokens": 1_000_000, "stream": is_stream})
            wait_for(lambda: server.do(server.client.stats).waiting == 1)
        elif not is_stream:
            first.close()
            server.wait_idle()
            sock = raw_request(server, {"max_tokens": 1_000_000})
            wait_for(lambda: server.do(server.client.stats).running == 1)
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        if moment == "queued":
            wait_for(lambda: server.do(server.client.stats).waiting == 0)
            assert server.do(server.client.stats).running == 1
            first.close()
        server.wait_idle()
        assert engine.aborts[-1][1] == "abort"


def test_same_request_id_on_all_does_not_mix_them_up() -> None:
    with serving() as server:
        answers: list[str] = [""] * 20

        def ask(index: int) -> None:
            body = {"prompt": f"<{index}>", "temperature": 0, "max_tokens": 50}
            answers[index] = json.loads(post(server, TEXT, body, **{"X-Request-Id": "same"})[1])["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(20)]
        aborted = raw_request(server, {"max_tokens": 400, "stream": True})
        for thread in threads:
            thread.start()
        aborted.close()
        for thread in threads:
            thread.join()
        assert answers == [(f"<{index}>" * 50)[:50] for index in range(20)]
        server.wait_idle()


def test_overload_has_the_clients_class() -> None:
    with serving(EchoEngine(max_waiting=0)) as server, sdk(server) as client:
        for is_stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="echo", prompt="x", stream=is_stream)
            assert caught.value.status_code == 503
            assert (caught.value.type, caught.value.code) == ("service_unavailable_error", "server_is_overloaded")
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert get(server, "/ready")[0].status == 200


def test_while_loading_health_is_good_and_ready_is_not() -> None:
    with serving(is_open=False) as server:
        assert get(server, "/health")[0].status == 200
        for path in ("/ready", "/v1/models"):
            response, raw = get(server, path)
            assert (response.status, response.headers["retry-after"]) == (503, "2")
            assert json.loads(raw)["error"]["type"] == "service_unavailable_error"
        response, raw = post(server, TEXT, {"prompt": "x"})
        assert response.status == 503
        assert "GET /ready" in json.loads(raw)["error"]["message"]
        assert get(server, "/metrics")[0].status == 200
        response, raw = get(server, "/version")
        assert (response.status, list(json.loads(raw))) == (200, ["version"])


def test_dead_engine_is_503_everywhere_and_streams_get_an_error_event() -> None:
    steps = iter(range(10))
    is_seen = threading.Event()

    def die() -> None:
        if next(steps) == 3:
            assert is_seen.wait(20)
            raise RuntimeError("secret detail at 0xdeadbeef")

    with serving(EchoEngine(on_step=die)) as server, sdk(server) as client:
        stream = client.completions.create(model="echo", prompt="x", max_tokens=400, stream=True)
        next(stream)
        is_seen.set()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert "secret" not in str(caught.value)
        for path in ("/health", "/ready", "/v1/models"):
            assert get(server, path)[0].status == 503
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="echo", prompt="x")
        assert refused.value.status_code == 503
        assert get(server, "/metrics")[0].status == 200


def test_failed_stream_ends_with_error_and_done() -> None:
    valve = Valve()
    valve.open()
    with serving(EchoEngine(on_step=valve, max_model_len=2_000_000, num_blocks=200_000)) as server:
        sock = raw_request(server, {"max_tokens": 1_000_000, "stream": True})
        data = sock.recv(1)
        server.do(lambda: server.service.drain(0.0))
        while chunk := sock.recv(65536):
            data += chunk
            if b"[DONE]" in data:
                break
        sock.close()
        lines = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        assert json.loads(lines[-2][6:])["error"]["type"] == "service_unavailable_error"
        server.wait_idle()


def test_drain_lets_begun_work_finish_and_takes_no_new() -> None:
    valve = Valve()
    with serving(EchoEngine(on_step=valve)) as server:
        sock = raw_request(server, {"max_tokens": 20})
        wait_for(lambda: len(server.engine.submits) == 1)
        server.service.begin_drain()
        assert get(server, "/ready")[0].status == 503
        assert get(server, "/health")[0].status == 200
        response, _ = post(server, TEXT, {"prompt": "x"})
        assert (response.status, response.headers["retry-after"]) == (503, "2")
        valve.open()
        server.do(lambda: server.service.drain(10.0))
        answer = sock.recv(65536)
        sock.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"abcabcabcabcabcabcab" in answer


def test_reader_that_stops_reading_is_cut_off_and_others_go_on() -> None:
    engine = EchoEngine(max_model_len=2_000_000, num_blocks=200_000)
    with serving(engine) as server:
        server.client._max_buffer_bytes = 64 * 1024
        # A fixed small window: the kernel would else grow it to tens of megabytes before anyone has to wait.
        with raw_request(server, {"max_tokens": 1_000_000, "stream": True, "n": 2}, receive_bytes=16384) as sock:
            sock.recv(100)
            wait_for(lambda: len(engine.aborts) >= 1)
            body = {"prompt": "ab", "temperature": 0, "max_tokens": 5}
            assert json.loads(post(server, TEXT, body)[1])["choices"][0]["text"] == "ababa"
        server.wait_idle()


def test_key_guards_every_route_but_two() -> None:
    with serving(api_key="sésame") as server:
        paths = [CHAT, TEXT, "/v1/models", "/v1/models/echo", "/tokenize", "/metrics", "/version", "/openapi.json"]
        odd = ["/", "/nothing", "//v1/models", "/v1/../metrics", "/%2e/metrics", "/health/", "/HEALTH"]
        keys = [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame"}]
        for path in paths + odd:
            for key in keys:
                sent = {name: value.encode().decode("latin-1") for name, value in key.items()}
                response, raw = get(server, path, **sent)
                assert response.status == 401, path
                assert json.loads(raw)["error"]["code"] == "invalid_api_key"
        assert get(server, f"/v1/models?key={'x'}", Host="a/health?x=")[0].status == 401
        assert get(server, "/health")[0].status == 200
        assert get(server, "/ready")[0].status == 200
        right = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
        assert get(server, "/v1/models", **right)[0].status == 200
        lower = {"Authorization": "bearer sésame".encode().decode("latin-1")}  # schemes have no case
        assert get(server, "/v1/models", **lower)[0].status == 200
        with sdk(server, "wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.type == "authentication_error"
