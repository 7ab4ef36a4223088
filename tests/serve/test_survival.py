"""The server as processes: closed terminals and used-up descriptors do not end it, and it speaks TLS."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.serve.protocol import BoundedProtocol
from raw_http import Raw, call, head
from serve_harness import serving
from server_process import server_process, words


def ask(url: str) -> str:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 6}
    status, told, _ = call(url, "POST", "/v1/completions", body)
    assert status == 200
    return str(told["choices"][0]["text"])


@pytest.mark.parametrize("shell", ['exec "$@" >&-', 'exec "$@" <&- >&- 2>&-'], ids=["stdout", "all"])
def test_closed_standard_streams_do_not_end_the_server(tmp_path: Path, shell: str) -> None:
    with server_process(tmp_path, shell) as server:
        process = server.process
        assert ask(server.url) == "abcabc"
        process.terminate()
        assert process.wait(20) == 0


def test_a_reader_of_its_output_that_has_gone_does_not_end_the_server(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with server_process(tmp_path, streams={"stdout": writing}) as server:
        process = server.process
        os.close(writing)
        assert ask(server.url) == "abcabc"
        process.terminate()
        assert process.wait(20) == 0


def test_sighup_without_a_config_file_ends_neither_server_nor_engine(tmp_path: Path) -> None:
    streams = {"start_new_session": True, "stdout": subprocess.DEVNULL}
    with server_process(tmp_path, streams=streams) as server:
        process, url = server.process, server.url
        os.killpg(process.pid, signal.SIGHUP)  # as a terminal does when it closes
        assert ask(url) == "abcabc"
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert call(url, "POST", "/v1/chat/completions", body)[0] == 200
        process.terminate()
        assert process.wait(20) == 0


def test_health_is_answered_when_connections_have_used_up_the_descriptors(tmp_path: Path) -> None:
    with server_process(tmp_path, 'ulimit -n 200; exec "$@"') as server, ExitStack() as stack:
        url = server.url
        host, port = url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        for _ in range(400):
            held = stack.enter_context(socket.create_connection((host, int(port)), 5))
            held.sendall(head)
        assert call(url, "GET", "/health", timeout_s=5)[0] == 200


# A certificate for localhost and 127.0.0.1 that this key has signed itself; for tests alone.
@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    folder = Path(__file__).parent.parent / "support" / "tls"
    return folder / "cert.pem", folder / "key.pem"


def test_tls(pair: tuple[Path, Path]) -> None:
    cert, key = pair
    with serving(tls_cert=str(cert), tls_key=str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection(server.url.removeprefix("https://"), timeout=20, context=trust)
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 6}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "abcabc"
        connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            call(server.url.replace("https", "http"), "GET", "/health")


def ask_tls(url: str, trust: ssl.SSLContext, path: str) -> int:
    connection = http.client.HTTPSConnection(url.removeprefix("https://"), timeout=20, context=trust)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_connections_that_begin_no_handshake_are_counted_and_end(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_s", 3.0)
    trust = ssl.create_default_context(cafile=str(pair[0]))
    with serving(tls_cert=str(pair[0]), tls_key=str(pair[1]), max_connections=4) as server, ExitStack() as stack:
        with Raw(server.url) as plain:
            plain.send(head("/health", None, method="GET"))
            assert plain.is_closed()
        silent = [stack.enter_context(Raw(server.url)) for _ in range(4)]
        assert ask_tls(server.url, trust, "/v1/models") == 503
        assert ask_tls(server.url, trust, "/health") == 200
        assert all(connection.is_closed() for connection in silent)
        assert ask_tls(server.url, trust, "/v1/models") == 200


def test_wrong_files_for_tls_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_key is .*; allowed: none, unless tls_cert is given"):
        ServerConfig(tls_key="key.pem")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for cert, key in ((wrong, pair[1]), (pair[0], wrong), (tmp_path / "none.pem", pair[1])):
        command = words(tmp_path, port=0, tls_cert=str(cert), tls_key=str(key))
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 2
        assert "give PEM files that belong together with --tls-cert and --tls-key" in done.stderr.splitlines()[-1]


def test_with_a_json_log_the_last_words_are_an_object_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = words(tmp_path, port=taken.getsockname()[1], log_format="json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "cannot listen on 127.0.0.1" in lines[-1]["message"]
