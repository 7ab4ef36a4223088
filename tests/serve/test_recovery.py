"""What clients see of an engine process that is killed, stopped or crashes: nothing but a pause, or one clear error."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serve.test_run import Server, started

from headway.config import ServerConfig
from headway.errors import EngineDead, EngineRestarting
from headway.serve import service as serve_service
from headway.serve.problem import Problem, problem_of
from headway.serve.service import ServedModel, Service
from headway.text.chat import ChatTemplate
from processes import command_of
from serve_harness import TEMPLATE, byte_tokenizer, model_directory
from server_process import words


class Begun(NamedTuple):
    """A stream and its first line, in which may be more than one token."""

    response: http.client.HTTPResponse
    first: bytes


class Recovering(Server):
    """A server whose engine may be signalled."""

    def begin(self, max_tokens: int) -> Begun:
        """A stream that has begun."""
        connection = self.connect()
        body = {"prompt": "abc", "temperature": 0, "max_tokens": max_tokens, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        return Begun(response, response.readline())

    def engine(self) -> int | None:
        for pid in self.children():
            if "_child.py" in command_of(pid) and "chat_child" not in command_of(pid):
                return pid
        return None

    def signal_engine(self, sig: int) -> int:
        pid = self.engine()
        assert pid is not None
        os.kill(pid, sig)
        return pid

    def fetch(self, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        with closing(connection):
            return response.status, response.headers, response.read()

    def post(self, **body: Any) -> tuple[int, http.client.HTTPMessage, dict[str, Any]]:
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "abc", "temperature": 0, **body}))
        response = connection.getresponse()
        with closing(connection):
            return response.status, response.headers, json.loads(response.read())

    def until_ready(self) -> None:
        deadline = time.monotonic() + 30
        while self.get("/ready") != 200:
            assert time.monotonic() < deadline, "it did not come back"
            time.sleep(0.02)


@contextmanager
def recovering(model: Path, **options: Any) -> Iterator[Recovering]:
    with started(model, **options) as process, closing(Recovering(process)) as server:
        yield server


def events_of(stream: Begun) -> list[bytes]:
    lines = (stream.first + stream.response.read()).split(b"\n")
    return [line[6:] for line in lines if line.startswith(b"data: ")]


def text_of(events: list[bytes]) -> str:
    assert events[-1] == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_streams_outlive_the_engine_process(tmp_path: Path, sig: int) -> None:
    with recovering(model_directory(tmp_path / "slow")) as server:
        streams = [server.begin(max_tokens=200) for _ in range(4)]
        pid = server.signal_engine(sig)
        statuses, waits = set(), set()
        while (status := server.fetch("/ready"))[0] == 200:
            time.sleep(0.02)  # not a tight loop: the log of every request goes to a pipe that is read at the end
        while (status := server.fetch("/ready"))[0] != 200:
            statuses.add(status[0])
            waits.add(status[1]["retry-after"])
            time.sleep(0.02)
            assert server.get("/health") == 200
        assert statuses == {503}
        assert all(wait is not None and 1 <= int(wait) <= 60 for wait in waits)
        for stream in streams:
            assert text_of(events_of(stream)) == ("abc" * 70)[:200]
        assert server.engine() != pid
        assert not Path(f"/proc/{pid}").exists(), "it was not reaped"
        assert server.post(max_tokens=4)[2]["choices"][0]["text"] == "abca"
        assert server.stop(signal.SIGTERM) == 0
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert f"engine process {pid} ended" in said
        assert "4 answers go on" in said


def test_a_request_that_comes_while_the_engine_restarts_is_told_when_to_come_back(tmp_path: Path) -> None:
    with recovering(model_directory(tmp_path / "slow")) as server:
        server.signal_engine(signal.SIGKILL)
        while server.get("/ready") == 200:  # one that comes before the death is noticed is taken, and waits
            time.sleep(0.02)
        status, headers, body = server.post(max_tokens=3)
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert 1 <= int(headers["retry-after"]) <= 60
        server.until_ready()
        assert server.post(max_tokens=3)[0] == 200


class Away:
    """A fleet none of whose engines is up."""

    dead, info = None, None

    def __init__(self, hold_s: float) -> None:
        self.recovering: float | None = 1.0
        self.hold_s = hold_s


def served(client: Away) -> Service:
    service = Service(ServerConfig())
    service.open(ServedModel("echo", client, byte_tokenizer(), ChatTemplate(TEMPLATE), 1))  # type: ignore[arg-type]
    return service


async def test_a_request_is_held_as_long_as_an_engine_is_likely_to_come_back() -> None:
    client = Away(3.0)
    service = served(client)
    asking = [asyncio.create_task(service.model_soon()) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in asking)
    client.recovering = None
    assert {(await each).name for each in asking} == {"echo"}


@pytest.mark.parametrize("end", ["none comes", "the server ends", "it is given up"])
async def test_a_request_that_is_held_in_vain_is_refused(end: str) -> None:
    client = Away(3.0)
    service = served(client)
    asking = asyncio.create_task(service.model_soon())
    await asyncio.sleep(0.1)
    assert not asking.done()
    if end == "none comes":
        client.hold_s = 0.0
    elif end == "the server ends":
        service.begin_drain()
    else:
        client.dead = "gone"  # type: ignore[assignment]
    with pytest.raises((Problem, EngineDead)) as refused:
        await asyncio.wait_for(asking, 1.0)
    assert problem_of(refused.value).status == 503


async def test_a_client_that_leaves_ends_the_wait_of_no_other_and_no_one_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_service, "HOLD_S", 0.2)
    service = served(Away(3.0))
    leaving, staying = (asyncio.create_task(service.model_soon()) for _ in range(2))
    await asyncio.sleep(0.05)
    leaving.cancel()
    await asyncio.sleep(0.05)
    assert not staying.done()
    with pytest.raises(Problem):  # engines that come and end again and again make it no longer
        await asyncio.wait_for(staying, 1.0)


def test_without_resume_a_begun_stream_ends_in_an_error_event(tmp_path: Path) -> None:
    with recovering(model_directory(tmp_path / "slow"), resume=False) as server:
        stream = server.begin(max_tokens=60_000)
        server.signal_engine(signal.SIGKILL)
        events = events_of(stream)
        assert events[-1] == b"[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_ended"
        server.until_ready()
        assert server.stop(signal.SIGTERM) == 0


def test_an_engine_that_cannot_be_brought_back_ends_the_server_with_1(tmp_path: Path) -> None:
    with recovering(model_directory(tmp_path / "die-in-second-life")) as server:
        stream = server.begin(max_tokens=60_000)
        server.signal_engine(signal.SIGKILL)
        events = events_of(stream)
        assert events[-1] == b"[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_dead"
        assert server.process.wait(20) == 1
        assert server.process.stderr is not None
        assert "3 times" in server.process.stderr.read().splitlines()[-1]


def test_a_request_that_crashes_the_engine_gets_a_500_and_others_go_on(tmp_path: Path) -> None:
    with recovering(model_directory(tmp_path / "poison")) as server:
        streams = [server.begin(max_tokens=150) for _ in range(3)]
        status, headers, body = server.post(prompt=[200], max_tokens=5)
        assert (status, headers["x-should-retry"], body["error"]["type"]) == (500, "false", "server_error")
        for stream in streams:
            assert text_of(events_of(stream)) == "abc" * 50
        server.until_ready()
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("moment", ["stopped", "killed"])
def test_sigterm_is_obeyed_in_time_whatever_the_engine_does(tmp_path: Path, moment: str) -> None:
    grace = 0.5
    with recovering(model_directory(tmp_path / "slow"), grace=grace) as server:
        streams = [server.begin(max_tokens=60_000) for _ in range(3)]
        server.signal_engine(signal.SIGSTOP if moment == "stopped" else signal.SIGKILL)
        began = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - began <= grace + 2  # one of them for a busy machine
        for stream in streams:
            events = events_of(stream)
            assert events[-1] == b"[DONE]"
            assert json.loads(events[-2])["error"]["type"] == "service_unavailable_error"


def test_sigterm_while_another_engine_starts_lets_answers_finish(tmp_path: Path) -> None:
    with recovering(model_directory(tmp_path / "slow"), grace=30.0) as server:
        streams = [server.begin(max_tokens=150) for _ in range(3)]
        server.signal_engine(signal.SIGKILL)
        while server.get("/ready") == 200:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert text_of(events_of(stream)) == "abc" * 50
        assert server.process.wait(20) == 0


def test_a_question_that_an_ended_engine_left_open_may_be_asked_again_and_one_to_a_dead_one_too() -> None:
    for error, code in ((EngineRestarting("being replaced"), "not_ready"), (EngineDead("gone"), "engine_dead")):
        problem = problem_of(error)
        assert (problem.status, problem.code) == (503, code)
        assert 1 <= int(problem.headers["retry-after"]) <= 60


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "headway.serve.server":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
"""


def test_sigterm_while_the_server_starts_ends_it_with_0(tmp_path: Path) -> None:
    command = words(tmp_path, port=0)
    command[2] = SLOW_IMPORT + command[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "SIGTERM: the server ends before it was up" in said
