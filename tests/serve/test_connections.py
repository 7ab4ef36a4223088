"""Connections that take their time, bring too much, or speak an older or newer HTTP than ours."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headway.request_limits import LIMITS
from headway.serve import body as body_module
from headway.serve.connections import ConnectionLimits, Standing, connection_limits
from headway.serve.protocol import BoundedProtocol
from raw_http import Raw, call, head, wait_for
from serve_harness import Harness, serving

TEXT = "/v1/completions"
ASK = json.dumps({"prompt": "abc", "temperature": 0, "max_tokens": 6}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with serving() as harness:
        yield harness


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time as a test can wait for them."""
    monkeypatch.setattr(body_module, "LIMITS", replace(LIMITS, body_s=0.3), raising=False)
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.3)
    monkeypatch.setattr(BoundedProtocol, "linger_s", 0.3, raising=False)
    monkeypatch.setattr(BoundedProtocol, "send_s", 0.3, raising=False)


def text_of(raw: bytes) -> str:
    return str(json.loads(raw)["choices"][0]["text"])


def dribble(raw: Raw, data: bytes, timeout_s: float = 8) -> None:
    """One byte at a time until the server says something or closes."""
    deadline = time.monotonic() + timeout_s
    for byte in data:
        raw.sock.settimeout(0.02)
        try:
            raw.sock.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            raw.send(bytes([byte]))
        except ConnectionError:
            break
        assert time.monotonic() < deadline, "the server waits for ever"
    raw.sock.settimeout(20)


@pytest.mark.usefixtures("hurry")
def test_a_dribbled_body_is_408(server: Harness) -> None:
    with Raw(server.url) as raw:
        raw.send(head(TEXT, 5000))
        dribble(raw, b" " * 4000)
        status, headers, body = raw.answer()
    assert (status, headers["x-should-retry"], headers["connection"]) == (408, "false", "close")
    assert json.loads(body)["error"]["code"] == "body_timeout"


@pytest.mark.usefixtures("hurry")
def test_half_a_body_and_then_silence_is_408(server: Harness) -> None:
    with Raw(server.url) as raw:
        raw.send(head(TEXT, len(ASK)) + ASK[:10])
        assert raw.answer()[0] == 408


def test_a_slow_body_that_keeps_coming_is_served(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "LIMITS", replace(LIMITS, body_s=0.3, body_rate=40_000))
    piece, num_pieces = b" " * 20_000, 20
    with Raw(server.url) as raw:
        begun = time.monotonic()
        raw.send(head(TEXT, num_pieces * len(piece) + len(ASK)))
        for _ in range(num_pieces):
            raw.send(piece)
            raw.sock.settimeout(0.03)
            with pytest.raises(TimeoutError):
                raw.sock.recv(1, socket.MSG_PEEK)
        raw.sock.settimeout(20)
        assert time.monotonic() - begun > 0.5
        raw.send(ASK)
        assert text_of(raw.answer()[2]) == "abcabc"


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("is_dribbled", [False, True])
def test_a_body_that_nobody_reads_does_not_hold_its_connection(is_dribbled: bool) -> None:
    with serving(api_key="k") as server, Raw(server.url) as raw:
        raw.send(head(TEXT, 5000))
        assert raw.answer()[0] == 401
        if is_dribbled:
            dribble(raw, b" " * 4000)
        assert raw.is_closed()


def test_a_connection_goes_on_after_a_body_that_nobody_read() -> None:
    with serving(api_key="k") as server, Raw(server.url) as raw:
        raw.send(head(TEXT, len(ASK)))
        assert raw.answer()[0] == 401
        raw.send(ASK + head(TEXT, len(ASK), "authorization: Bearer k") + ASK)
        assert text_of(raw.answer()[2]) == "abcabc"


@pytest.mark.usefixtures("hurry")
def test_line_breaks_between_requests_do_not_hold_a_connection(server: Harness) -> None:
    with Raw(server.url) as raw:
        raw.send(head(TEXT, len(ASK)) + ASK)
        assert raw.answer()[0] == 200
        dribble(raw, b"\r\n" * 2000)
        assert raw.is_closed()


@pytest.mark.usefixtures("hurry")
def test_a_connection_that_sends_nothing_is_408(server: Harness) -> None:
    with Raw(server.url) as raw:
        assert raw.answer()[0] == 408


@pytest.mark.usefixtures("hurry")
def test_an_answer_that_is_not_read_is_dropped() -> None:
    # Log probabilities make a megabyte of a thousand tokens: more than sockets hold for a client that does not read.
    ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 450, "logprobs": True, "top_logprobs": 20}
    ask["n"] = 16
    with serving() as server, Raw(server.url, receive_bytes=4096) as raw:
        data = json.dumps(ask).encode()
        raw.send(head("/v1/chat/completions", len(data)) + data)
        wait_for(lambda: bool(server.server.server_state.connections))
        wait_for(lambda: not server.server.server_state.connections)
        server.wait_idle()
        assert not server.engine.aborts, "it was answered in full"


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "body apart"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_an_upgrade_to_http2_is_ignored_and_the_body_kept(server: Harness, is_split: bool, is_chunked: bool) -> None:
    upgrade = (
        "connection: Upgrade, HTTP2-Settings",
        "upgrade: h2c",
        "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    begin = head(TEXT, None, *upgrade, "transfer-encoding: chunked") if is_chunked else head(TEXT, len(ASK), *upgrade)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASK), ASK) if is_chunked else ASK
    with Raw(server.url) as raw:
        raw.send(begin if is_split else begin + sent)
        if is_split:
            raw.send(sent)
        for _ in range(2):  # the connection goes on as it was
            status, _, body = raw.answer()
            assert (status, text_of(body)) == (200, "abcabc")
            raw.send(head(TEXT, len(ASK)) + ASK)


def test_a_large_body_and_the_beginning_of_the_next_head_in_one_piece(server: Harness) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3, "temperature": 0' + b" " * 40_000 + b"}"
    after = head("/health", None, method="GET")
    with Raw(server.url) as connection:
        connection.send(head("/v1/completions", len(body)) + body + after[:10])
        assert connection.answer()[0] == 200
        connection.send(after[10:])
        assert connection.answer()[0] == 200


def test_connect_is_no_request_of_ours(server: Harness) -> None:
    with Raw(server.url) as raw:
        raw.send(b"CONNECT a.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.answer()[0] == 400


def test_a_key_behind_the_body_is_no_key() -> None:
    with serving(api_key="k") as server, Raw(server.url) as raw:
        begin = head(TEXT, None, "transfer-encoding: chunked", "trailer: authorization")
        raw.send(begin + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer k\r\n\r\n" % (len(ASK), ASK))
        assert raw.answer()[0] == 401


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_closes_its_side_gets_its_answer(server: Harness, is_stream: bool) -> None:
    data = json.dumps({"prompt": "abc", "temperature": 0, "max_tokens": 300, "stream": is_stream}).encode()
    with Raw(server.url) as raw:
        raw.send(head(TEXT, len(data)) + data)
        raw.sock.shutdown(socket.SHUT_WR)
        status, _, body = raw.answer()
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n") if is_stream else text_of(body) == "abc" * 100
        assert raw.is_closed()
    server.wait_idle()


def test_beyond_the_limit_only_health_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    with serving(max_connections=3, max_connections_per_ip=3) as server:
        held = [Raw(server.url) for _ in range(3)]
        wait_for(lambda: len(server.server.server_state.connections) == 3)
        for path in ("/health", "/ready"):
            assert call(server.url, "GET", path)[0] == 200
        status, told, headers = call(server.url, "GET", "/v1/models")
        assert (status, told["error"]["code"], headers["retry-after"]) == (503, "too_many_connections", "2")
        assert headers["connection"] == "close"
        for raw in held:
            raw.sock.close()
        wait_for(lambda: not server.server.server_state.connections)
        assert call(server.url, "GET", "/v1/models")[0] == 200
    lines = [record for record in caplog.records if record.name == "headway.serve.connections"]
    assert [record.levelno for record in lines] == [logging.WARNING]
    assert "3 are open, 3 of them from 127.0.0.1" in lines[0].getMessage()


def test_one_address_cannot_take_all_connections() -> None:
    limits = ConnectionLimits(4, 3)
    assert [limits.opened("a") for _ in range(4)] == [Standing.FULL] * 3 + [Standing.PROBE]
    assert limits.opened("b") is Standing.FULL
    limits.closed("a", Standing.FULL)
    assert limits.opened("a") is Standing.FULL
    assert [limits.opened("c") for _ in range(32)] == [Standing.PROBE] * 31 + [Standing.NONE]


def test_limits_of_connections_leave_descriptors_to_probes() -> None:
    assert [(got.total, got.per_address) for got in (connection_limits(None, None, n) for n in (1024, 8192, 10))] == [
        (928, 696),
        (4096, 3072),
        (8, 6),
    ]
    given = connection_limits(100, 200, 1024)
    assert (given.total, given.per_address) == (100, 100)
