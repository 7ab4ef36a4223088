"""Adapters over HTTP: names of models, loading and unloading at the admin socket, and engines that are killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from adapter_files import adapter_tensors, random_adapter_files, write_adapter
from headway.models.spec import ModelSpec
from processes import command_of
from server_process import ServerProcess, wait_ready
from tiny_dir import write_tiny_model
from unix_http import ask


class Served(NamedTuple):
    server: ServerProcess
    admin: Path
    folder: Path
    spec: ModelSpec

    def load(self, name: str, path: Path | str) -> tuple[int, Any]:
        body = {"lora_name": name, "lora_path": str(path)}
        return ask(self.admin, "POST", body, url="/v1/load_lora_adapter")

    def unload(self, name: str) -> tuple[int, Any]:
        return ask(self.admin, "POST", {"lora_name": name}, url="/v1/unload_lora_adapter")

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
        request = urllib.request.Request(self.server.url + path, json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def text(self, model: str | None, seed: int = 1) -> str:
        body = {"prompt": "the cat", "max_tokens": 24, "seed": seed, "ignore_eos": True}
        status, answer = self.post(body if model is None else {**body, "model": model})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def models(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(self.server.url + "/v1/models", timeout=10) as response:
            return list(json.loads(response.read())["data"])


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two replicas"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    spec = write_tiny_model(folder / "tiny")
    random_adapter_files(folder / "first", spec, 1, size=0.7)
    random_adapter_files(folder / "second", spec, 2, size=0.7)
    admin = folder / "admin.sock"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [Path(sys.executable).with_name("headway"), "serve", folder / "tiny", "--port", port]
    command += ["--adapter", f"first={folder / 'first'}", "--admin-socket", admin, "--replicas", request.param]
    command += ["--num-blocks", 200, "--threads", 1, "--cache-dir", folder / "cache", "--log-level", "warning"]
    with subprocess.Popen(list(map(str, command))) as process:
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)  # type: ignore[arg-type]
            yield Served(ServerProcess(process, f"http://127.0.0.1:{port}"), admin, folder, spec)  # type: ignore[arg-type]
        finally:
            process.terminate()


def test_names_of_models_are_those_of_adapters(served: Served) -> None:
    assert [(card["id"], card.get("parent")) for card in served.models()] == [("tiny", None), ("first", "tiny")]
    base, first = served.text(None), served.text("first")
    assert base != first
    assert served.text("tiny") == base
    assert served.text("tiny:first") == first
    status, answer = served.post({"prompt": "a", "max_tokens": 1, "model": "first"})
    assert (status, answer["model"]) == (200, "first")
    for name in ("second", "tiny:second", "other:first", "tiny:", "first:first"):
        status, answer = served.post({"prompt": "a", "max_tokens": 1, "model": name})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "this server has 'tiny', 'first'" in answer["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1, "model": "tiny:first"}
    assert served.post(chat, "/v1/chat/completions")[0] == 200


def test_loading_at_run_time_and_what_is_refused(served: Served, tmp_path: Path) -> None:
    assert served.load("second", served.folder / "second")[0] == 200
    assert [card["id"] for card in served.models()] == ["tiny", "first", "second"]
    second = served.text("second")
    assert second not in (served.text("first"), served.text(None))
    bad = write_adapter(tmp_path / "bad", adapter_tensors(served.spec), use_dora=True)
    for name, path, words in [
        ("second", served.folder / "second", "is loaded already"),
        ("tiny", served.folder / "second", "another name than the model's"),
        ("a b", served.folder / "second", "lora_name is 'a b'"),
        ("x", tmp_path / "nowhere", "there is no adapter directory"),
        ("x", "/dev/zero", "there is no adapter directory"),
        ("x", bad, "asks for 'use_dora'"),
        ("x", "", "lora_path takes"),
    ]:
        status, answer = served.load(name, path)
        assert status in (400, 409), answer
        assert words in answer["error"]["message"]
    assert ask(served.admin, "POST", b"{", url="/v1/load_lora_adapter")[0] == 400
    assert served.unload("unknown")[0] == 404
    assert served.unload("second")[0] == 200
    assert [card["id"] for card in served.models()] == ["tiny", "first"]
    assert served.post({"prompt": "a", "max_tokens": 1, "model": "second"})[0] == 404
    # The server's own port neither loads nor unloads.
    assert served.post({"lora_name": "x", "lora_path": "/"}, "/v1/load_lora_adapter")[0] == 404
    # The same name with other weights: nothing of the first one's blocks is found.
    random_adapter_files(tmp_path / "other", served.spec, 5, size=0.7)
    assert served.load("second", tmp_path / "other")[0] == 200
    assert served.text("second") != second
    assert served.unload("second")[0] == 200


class Streams(threading.Thread):
    """Streamed answers of one model, one after the other; `texts` of those that ended."""

    def __init__(self, served: Served, model: str) -> None:
        super().__init__()
        self.served, self.model = served, model
        self.texts: list[str] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            self.texts.append(self.served.text(self.model, seed=7))


def test_loads_and_unloads_beside_traffic_change_no_answer(served: Served) -> None:
    wanted = {name: served.text(name, seed=7) for name in ("tiny", "first")}
    streams = [Streams(served, name) for name in ("tiny", "first", "tiny")]
    for each in streams:
        each.start()
    try:
        for at in range(8):
            assert served.load(f"hot{at}", served.folder / "second")[0] == 200
            assert served.unload(f"hot{at}")[0] == 200
    finally:
        for each in streams:
            each.is_over.set()
        for each in streams:
            each.join(60)
    for each in streams:
        assert set(each.texts) == {wanted[each.model]}
        assert each.texts


def begin(served: Served, model: str, max_tokens: int) -> http.client.HTTPResponse:
    asked = {"prompt": "the cat", "max_tokens": max_tokens, "seed": 1, "ignore_eos": True, "stream": True}
    data = json.dumps({**asked, "model": model}).encode()
    response: http.client.HTTPResponse = urllib.request.urlopen(served.server.url + "/v1/completions", data, timeout=60)
    return response


def streamed(response: http.client.HTTPResponse) -> str:
    with response:
        lines = [line[6:] for line in response.read().split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def test_unloading_waits_for_those_that_have_it(served: Served) -> None:
    assert served.load("second", served.folder / "second")[0] == 200
    wanted = streamed(begin(served, "second", 300))
    response = begin(served, "second", 300)
    assert served.unload("second")[0] == 200
    assert streamed(response) == wanted


def test_killed_engines_go_on_with_the_adapters_they_had(served: Served) -> None:
    assert served.load("second", served.folder / "second")[0] == 200
    wanted = {name: streamed(begin(served, name, 400)) for name in ("tiny", "first", "second")}
    responses = {name: begin(served, name, 400) for name in wanted}
    for _, response in responses.items():
        response.peek(1)
    for pid in engines(served):
        os.kill(pid, signal.SIGKILL)
    assert {name: streamed(response) for name, response in responses.items()} == wanted
    deadline = time.monotonic() + 30
    while len(engines(served)) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: streamed(begin(served, name, 400)) for name in wanted} == wanted
    assert served.unload("second")[0] == 200


def engines(served: Served) -> list[int]:
    return [pid for pid in served.server.children() if "headway.cli.engine_child" in command_of(pid)]
