"""The whole server as processes: it announces itself, drains, and leaves nothing behind, whatever happens."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import echo_child
from processes import all_end, children_of
from serve_harness import model_directory

CHILD = str(Path(echo_child.__file__))
SCRIPT = """
import json
import sys
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.serve.run import run
model, options, child = sys.argv[1:]
engine = EngineConfig.of(model=model, max_model_len=100_000)
sys.exit(run(ServeConfig(engine, ServerConfig(**json.loads(options))), command=(child,)))
"""


class Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.lines = [process.stdout.readline() for _ in range(3)]
        found = re.search(r"http://\S+", self.lines[0])
        assert found, self.lines
        self.url = found.group()
        self.netloc = urlsplit(self.url).netloc
        self._connections: list[http.client.HTTPConnection] = []

    def connect(self) -> http.client.HTTPConnection:
        self._connections.append(http.client.HTTPConnection(self.netloc, timeout=20))
        return self._connections[-1]

    def get(self, path: str) -> int:
        connection = self.connect()
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        connection = self.connect()
        body = {"prompt": "abc", "temperature": 0, "max_tokens": max_tokens, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        response.readline()
        return response

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def stop(self, sig: int) -> int:
        """Signal it and wait; fails if it or any of its children outlives that."""
        with all_end(self.children()):
            self.process.send_signal(sig)
            return self.process.wait(20)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@contextmanager
def started(model: Path, *, port: int = 0, grace: float = 10.0, **options: object) -> Iterator[subprocess.Popen[str]]:
    options |= {"port": port, "shutdown_grace_s": grace}
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(options), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_announced_line_works_and_sigterm_ends_everything(tmp_path: Path) -> None:
    with started(model_directory(tmp_path / "echo")) as process, closing(Server(process)) as server:
        words = shlex.split(server.lines[2])
        assert words[:2] == ["curl", f"{server.url}/v1/chat/completions"]
        connection = server.connect()
        connection.request("POST", "/v1/chat/completions", words[words.index("-d") + 1])
        answer = json.loads(connection.getresponse().read())
        assert answer["model"] == "echo"
        assert len(answer["choices"][0]["message"]["content"]) == 64
        assert server.get("/ready") == 200
        assert len(server.children()) == 2  # the engine and the template's process
        assert server.stop(signal.SIGTERM) == 0


def test_requests_take_the_models_sampling_values_where_they_give_none(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "echo")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_p": 0.5}))
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 9}
    with started(model) as process, closing(Server(process)) as server:

        def answer(path: str, **fields: object) -> dict[str, Any]:
            connection = server.connect()
            connection.request("POST", path, json.dumps(fields))
            (choice,) = json.loads(connection.getresponse().read())["choices"]
            return dict(choice)

        # Greedy answers repeat the prompt.
        assert answer("/v1/completions", prompt="abc", max_tokens=6)["text"] == "abcabc"
        assert answer("/v1/chat/completions", **chat)["message"]["content"] == "user: abc"
        assert answer("/v1/completions", prompt="abc", max_tokens=6, temperature=1)["text"] != "abcabc"
        assert answer("/v1/chat/completions", **chat, temperature=1)["message"]["content"] != "user: abc"
        connection = server.connect()
        connection.request("GET", "/v1/models")
        (card,) = json.loads(connection.getresponse().read())["data"]
        assert (card["default_sampling"]["temperature"], card["default_sampling"]["top_p"]) == (0.0, 0.5)
        assert server.stop(signal.SIGTERM) == 0


def test_bound_beyond_this_machine_it_says_where_it_is_reached_and_that_no_key_is_asked_for(tmp_path: Path) -> None:
    with started(model_directory(tmp_path / "echo"), host="0.0.0.0") as process, closing(Server(process)) as server:
        assert process.stdout is not None
        found = re.search(r"On this network: http://(\S+):(\d+)", "".join(server.lines))
        assert found
        assert found.group(2) == str(urlsplit(server.url).port)
        assert server.stop(signal.SIGTERM) == 0
        assert process.stderr is not None
        assert "asks for no key" in process.stderr.read()


def test_with_a_key_the_announced_line_names_it_and_nothing_is_warned_of(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "echo")
    with started(model, host="0.0.0.0", api_key="secret") as process, closing(Server(process)) as server:
        assert process.stdout is not None
        lines = "".join([*server.lines, process.stdout.readline()])
        assert '-H "Authorization: Bearer $HEADWAY_API_KEY"' in lines
        assert "secret" not in lines
        assert server.stop(signal.SIGTERM) == 0
        assert process.stderr is not None
        assert "no key" not in process.stderr.read()


def test_every_log_line_is_json_if_asked_for(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "echo")
    with started(model, log_format="json") as process, closing(Server(process)) as server:
        assert server.get("/health?key=secret") == 200
        assert server.get("/no%0Asuch") == 404
        assert server.stop(signal.SIGTERM) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr]
    assert all({"time", "level", "process", "logger", "message"} <= line.keys() for line in lines)
    requests = [line for line in lines if line["logger"] == "headway.serve.access"]
    assert [(line["method"], line["path"], line["status"]) for line in requests] == [
        ("GET", "/health", 200),
        ("GET", "/no%0Asuch", 404),
    ]
    assert all(line["client"] == "127.0.0.1" and line["duration_ms"] >= 0 and line["request_id"] for line in requests)


def test_sigint_lets_a_stream_finish(tmp_path: Path) -> None:
    with started(model_directory(tmp_path / "slow")) as process, closing(Server(process)) as server:
        stream = server.stream(max_tokens=100)
        status: list[int] = []
        ended = threading.Thread(target=lambda: status.append(server.stop(signal.SIGINT)))
        ended.start()
        events = [line for line in stream.read().split(b"\n") if line.startswith(b"data: ")]
        ended.join()
        assert events[-1] == b"data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert status == [0]


@pytest.mark.parametrize("num_signals", [1, 2])
def test_what_is_not_done_in_time_gets_an_error(tmp_path: Path, num_signals: int) -> None:
    grace = 0.1 if num_signals == 1 else 60.0
    with started(model_directory(tmp_path / "slow"), grace=grace) as process, closing(Server(process)) as server:
        stream = server.stream(max_tokens=60_000)
        if num_signals == 2:
            process.send_signal(signal.SIGTERM)
            while server.get("/ready") != 503:
                pass
            assert server.get("/health") == 200
        status: list[int] = []
        ended = threading.Thread(target=lambda: status.append(server.stop(signal.SIGTERM)))
        ended.start()
        events = [line for line in stream.read().split(b"\n") if line.startswith(b"data: ")]
        ended.join()
        assert events[-1] == b"data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["type"] == "service_unavailable_error"
        assert status == [0]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("bad-config", 2, "not good enough"), ("crash-in-build", 1, "out of luck"), ("die-in-build", 1, "has ended")],
)
def test_failed_start_exits_with_one_sentence(tmp_path: Path, name: str, code: int, words: str) -> None:
    with started(model_directory(tmp_path / name)) as process:
        assert process.wait(20) == code
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith("headway: ")
        assert words in last


def test_missing_model_and_taken_port_exit_with_2(tmp_path: Path) -> None:
    with started(tmp_path / "nothing") as process:
        assert process.wait(20) == 2
    model = model_directory(tmp_path / "echo")
    with socket.create_server(("127.0.0.1", 0)) as taken, started(model, port=taken.getsockname()[1]) as process:
        assert process.wait(20) == 2
        assert process.stderr is not None
        assert re.search(
            r"cannot listen on 127\.0\.0\.1 port \d+: [^()]+; choose another with --host and --port",
            process.stderr.read(),
        )


def test_with_json_lines_the_warning_is_one_too() -> None:
    code = (
        "from headway import logs; from headway.config import ServerConfig; from headway.serve.run import announce;"
        "logs.set_up('server', 'info', 'json');"
        "announce('http://0.0.0.0:1', 'm', ServerConfig(host='0.0.0.0', log_format='json'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["level"] == "warning"
    assert "asks for no key" in line["message"]
