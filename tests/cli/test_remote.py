"""`headway chat --url` against a real HTTP server that plays scripted answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headway.cli.main import main
from headway.cli.remote import Remote
from headway.errors import ConfigError, EngineError
from running import running


@dataclass
class Script:
    """What the server answers, and what it was asked."""

    url: str = ""
    status: int = 200
    lines: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def says(self, *pieces: str, done: bool = True) -> None:
        events = [json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in pieces]
        self.lines = [f"data: {event}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer('{"data": [{"id": "tiny"}]}', 200 if self.path == "/v1/models" else 404)

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            script.keys.append(self.headers["Authorization"])
            self.answer("".join(script.lines), script.status if self.path == "/v1/chat/completions" else 404)

        def answer(self, text: str, status: int) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    script.url = f"http://127.0.0.1:{http.server_port}"
    with running(http):
        yield script


def test_answer_is_printed_as_it_comes(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    server.says("Hel", "", "lo 🙂")
    environ = {"HEADWAY_API_KEY": "secret"}
    assert main(["chat", "hi", "--url", server.url + "/v1", "--system", "be brief", "--seed", "7"], environ) == 0
    assert capsys.readouterr().out == "Hello 🙂\n"
    assert server.keys == ["Bearer secret"]
    assert server.bodies == [
        {
            "model": "tiny",
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        }
    ]


def test_conversation_keeps_its_messages_until_new(
    server: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says("yes")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n/exit\nfour\n"))
    assert main(["chat", "--url", server.url], {}) == 0
    assert capsys.readouterr().out == "yes\nyes\nyes\n"
    said = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert said == [["one"], ["one", "yes", "two"], ["three"]]


@pytest.mark.parametrize("name", ["huge", "smollm2-135m-instruct"])
def test_a_model_that_was_named_is_asked_for_even_if_it_is_the_default(
    server: Script, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["chat", "hi", "--url", server.url, "--model", name], {}) == 2
    assert f"model is {name!r}; {server.url} offers tiny" in capsys.readouterr().err
    server.says("hello")
    assert main(["chat", "hi", "--url", server.url, "--model", "tiny"], {}) == 0
    assert server.bodies[-1]["model"] == "tiny"


def test_options_of_the_engine_beside_a_server_are_refused(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "hi", "--url", server.url, "--dtype", "q4"], {}) == 2
    assert "--dtype is for a model in this process; the server at --url decides it" in capsys.readouterr().err
    server.says("hello")
    assert main(["chat", "hi", "--url", server.url], {"HEADWAY_DTYPE": "q4"}) == 0  # meant for other commands


def test_refusal_of_the_server_is_one_sentence(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 400
    server.lines = ['{"error": {"message": "prompt too long"}}']
    assert main(["chat", "hi", "--url", server.url], {}) == 1
    assert capsys.readouterr().err == f"headway: {server.url} answered 400: prompt too long\n"


def test_a_page_of_a_server_of_another_kind_is_not_printed(server: Script, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 404
    server.lines = ["<!doctype html>\n<title>nothing here</title>"]
    assert main(["chat", "hi", "--url", server.url], {}) == 1
    said = f"headway: {server.url} answered 404: a page of HTML; is it an OpenAI-compatible server?\n"
    assert capsys.readouterr().err == said


def test_error_in_the_stream_and_a_cut_stream_are_reported(server: Script) -> None:
    remote = Remote(server.url)
    server.lines = ['data: {"error": {"message": "engine died"}}\n\n', "data: [DONE]\n\n"]
    with pytest.raises(EngineError, match="engine died"):
        list(remote.stream([], {}))
    server.says("half an ans", done=False)
    with pytest.raises(EngineError, match="before the answer was complete"):
        list(remote.stream([], {}))
    server.lines = ["data: {oops\n\n"]
    with pytest.raises(EngineError, match="not JSON"):
        list(remote.stream([], {}))


def test_no_server_is_one_sentence(server: Script) -> None:
    with pytest.raises(EngineError, match=r"cannot reach .*; start a server with: headway serve"):
        Remote("127.0.0.1:1").models()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "http://host:x"])
def test_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url is"):
        Remote(url)
