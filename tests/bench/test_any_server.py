"""`bench serve --url` against a server that speaks OpenAI's protocol and nothing of headway's own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headway.bench.client import Target, offered
from headway.bench.latency import Answered, Objectives, read_answer, summary
from headway.cli.main import main
from headway.errors import ConfigError, EngineError

PLAIN = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options"}


class Plain:
    """Refuses every field that OpenAI's API has not; says `max_tokens` words, three at most."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.refuses: Callable[[int], bool] = lambda count: False
        self.has_usage = True
        self.url = ""

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "plain"}, {"id": "other"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        if body.keys() - PLAIN:
            return JSONResponse({"error": {"message": f"unknown field {sorted(body.keys() - PLAIN)}"}}, 400)
        if self.refuses(len(self.bodies)):
            return JSONResponse({"error": {"message": "come back later"}}, 503)
        return StreamingResponse(self._events("messages" in body, body["max_tokens"]), media_type="text/event-stream")

    async def _events(self, is_chat: bool, max_tokens: int) -> AsyncIterator[bytes]:
        yield b": a comment\n\n"
        if is_chat:
            yield self._event({"index": 0, "delta": {"role": "assistant", "content": ""}})
        for _ in range(min(3, max_tokens)):
            event = self._event({"index": 0, **({"delta": {"content": "word "}} if is_chat else {"text": "word "})})
            yield event[:9]  # an event need not be one piece
            await asyncio.sleep(0)
            yield event[9:]
        yield self._event({"index": 0, "delta": {}, "finish_reason": "stop"})
        if self.has_usage:
            yield b'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}}\n\n'
        yield b"data: [DONE]\n\n"

    def _event(self, choice: dict[str, Any]) -> bytes:
        return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@pytest.fixture
def plain() -> Iterator[Plain]:
    server = Plain()
    paths = {"/api/v1/chat/completions": server.complete, "/api/v1/completions": server.complete}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]
    app = Starlette(routes=[*routes, Route("/api/v1/models", server.models)])
    web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    listener = web.config.bind_socket()
    listener.listen()  # a client that comes before the server accepts waits
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1"
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield server
    finally:
        web.should_exit = True
        thread.join()
        listener.close()


def bench(plain: Plain, *more: str) -> int:
    counts = ("--requests", "6", "--streams", "2", "--rounds", "2")
    return main(["bench", "serve", "--url", plain.url, *counts, "--json", *more], {})


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_any_server_has_its_percentiles_and_goodput_printed(
    plain: Plain, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(plain, "--endpoint", endpoint, "--api-key", "secret") == 0
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    assert (record["model"], record["n"], record["failed"], record["goodput"]) == ("plain", 6, 0, 1.0)
    assert (record["in_tok"], record["out_tok"]) == (12 * 11, 12 * 4), "as the server counts"
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 <= record[name]["p50"] <= record[name]["p90"] <= record[name]["p99"]
    assert 0 < record["ttft_ms"]["p50"] <= record["e2e_ms"]["p50"]
    assert all(words in out for words in ("P50", "P90", "P99", "TTFT, ms", "ITL, ms", "E2E, ms"))
    assert "goodput: 100.0% of the requests had TTFT <= 1000 ms, mean ITL <= 100 ms" in out
    assert plain.keys == {"Bearer secret"}
    assert len({json.dumps(body) for body in plain.bodies}) == 13, "no two prompts are equal"


def test_objectives_that_no_answer_meets_leave_no_goodput(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(plain, "--slo-ttft-ms", "0.001", "--model", "other") == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["goodput"], record["slo"]["ttft_ms"], record["model"]) == (0.0, 0.001, "other")
    assert {body["model"] for body in plain.bodies} == {"other"}


def test_requests_that_fail_are_counted_and_one_reason_is_given(
    plain: Plain, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.refuses = lambda count: count % 4 == 0
    assert bench(plain) == 0
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    assert (record["failed"], record["goodput"]) == (3, 0.75)
    assert "3 of 12 requests failed" in out
    assert "the first that failed: status 503: come back later" in out


def test_pieces_are_counted_where_the_server_does_not_count(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    plain.has_usage = False
    assert bench(plain) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["in_tok"], record["out_tok"]) == (None, 12 * 3)


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--extra-body", '{"ignore_eos": true}'], 1, "answered no request: status 400: unknown field ['ignore_eos']"),
        (["--extra-body", "[]"], 2, "extra_body is '[]'; allowed: a JSON object"),
        (["--extra-body", "{"], 2, "which is not JSON"),
        (["--slo-itl-ms", "0"], 2, "slo_itl_ms is 0; allowed: milliseconds above 0"),
        (["--dtype", "int8"], 2, "only --model is taken"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    plain: Plain, more: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(plain, *more) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_no_server_and_another_server_are_one_sentence(plain: Plain, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1/v1"], {}) == 1
    assert "cannot reach http://127.0.0.1:1/v1" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1/v1", "--model", "m"], {}) == 1
    assert "cannot reach 127.0.0.1:1" in capsys.readouterr().err
    with pytest.raises(EngineError, match=r"offers no model .*404.*; is it an OpenAI-compatible server"):
        offered(plain.url + "/nothing")


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999"])
def test_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url is"):
        Target.of(url, "m")


def test_an_https_address_is_taken() -> None:
    target = Target.of("https://models.example.org/v1/", "m")
    assert (target.is_secure, target.port, target.prefix) == (True, 443, "")


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_times_count_from_the_first_text_and_the_framing_does_not_matter() -> None:
    word = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    last = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    sent = [HEAD, _chunk(role), _chunk(word[:20]), _chunk(word[20:] + word[:5]), _chunk(word[5:]) + _chunk(last)]
    answer = read_answer(10.0, [(11.0 + number, data) for number, data in enumerate(sent)])
    assert (answer.fault, answer.ttft_s, answer.e2e_s, answer.itls, answer.num_tokens) == (None, 4.0, 5.0, [1.0], 2)
    whole = b"".join(sent)
    for size in (1, 7):
        pieces = [(11.0, whole[at : at + size]) for at in range(0, len(whole), size)]
        assert read_answer(10.0, pieces).num_tokens == 2
    assert read_answer(10.0, [(11.0, HEAD + _chunk(role + last))]).fault == "the answer has no text"
    cut = read_answer(10.0, [(11.0, HEAD + _chunk(word))])
    assert cut.fault == "the connection was closed before the answer was complete"


def test_goodput_asks_for_both_objectives_and_the_mean_itl() -> None:
    def answered(ttft_s: float, itls: list[float], fault: str | None = None) -> Answered:
        return Answered(fault, ttft_s, ttft_s + sum(itls), itls, len(itls) + 1)

    answers = [
        answered(0.5, [0.01, 0.15]),  # a mean of 80 ms
        answered(1.5, [0.01]),
        answered(0.5, [0.2, 0.1]),
        answered(0.5, [0.01], "failed"),
        answered(0.9, []),
    ]
    seen = summary(answers, Objectives())
    assert (seen["goodput"], seen["failed"]) == (0.4, 1)
    assert seen["ttft_ms"] == {"p50": 900.0, "p90": 1500.0, "p99": 1500.0}
