"""A real `headway serve` over a small model: SIGHUP and the admin socket change it while requests run."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_dir import write_tiny_model
from unix_http import ask

CONFIG = """
[scheduler]
policy = "slo"
policy_options = "beta=20"
max_num_seqs = 6
max_num_batched_tokens = {tokens}
{more}
[cache]
num_blocks = 400
"""
PROMPTS = [[(11 * i + 5 * j) % 250 for j in range(20 + 9 * i)] for i in range(8)]


class Server:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "headway.toml"
        self.admin = folder / "admin.sock"
        self.log = folder / "log"
        self.write()
        command = [sys.executable, "-m", "headway.cli.main", "serve", str(folder), "--config", str(self.file)]
        command += ["--port", "0", "--cache-dir", str(folder / "cache"), "--admin-socket", str(self.admin)]
        command += ["--threads", "1", "--max-waiting", "500"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://(\S+)", line)
        assert found, (line, self.log.read_text())
        self.netloc = found.group(1)

    def write(self, more: str = "", tokens: int = 64, beta: str = "beta=20") -> None:
        self.file.write_text(CONFIG.format(more=more, tokens=tokens).replace("beta=20", beta))

    def hang_up(self, words: str) -> str:
        """Send SIGHUP and wait until the log says so; the lines it added."""
        before = len(self.log.read_text())
        self.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while words not in (text := self.log.read_text()[before:]):
            assert time.monotonic() < deadline, text
            assert self.process.poll() is None, text
            time.sleep(0.01)
        return text

    def complete(self, prompt: list[int], began: threading.Event | None = None) -> str:
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 800, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        text = ""
        for line in response:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if began is not None:
                    began.set()
        connection.close()
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_len=1024)
    server = Server(folder)
    with server.process:
        try:
            yield server
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
        finally:
            server.process.kill()
    assert not server.admin.exists()


def test_requests_in_flight_survive_every_change_with_the_same_tokens(server: Server) -> None:
    alone = [server.complete(prompt) for prompt in PROMPTS]
    answers: dict[int, str] = {}
    began = threading.Event()

    def run(index: int) -> None:
        answers[index] = server.complete(PROMPTS[index], began)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    assert began.wait(20)
    assert ask(server.admin, "PATCH", {"max_num_seqs": 2, "target_itl_ms": 5, "max_chunk_tokens": 7})[0] == 200
    server.write("victims = 'last-come'", tokens=300, beta="beta=5")
    text = server.hang_up("SIGHUP: changed")
    assert "max_num_batched_tokens 64 -> 300" in text
    assert "victims 'least-recompute' -> 'last-come'" in text
    assert "beta 20 -> 5" in text
    status, settings = ask(server.admin, "GET")
    assert status == 200
    assert (settings["max_num_seqs"], settings["target_itl_ms"]) == (2, 5)  # the file said nothing new about these
    assert (settings["max_num_batched_tokens"], settings["victims"], settings["beta"]) == (300, "last-come", 5)
    assert len(answers) < len(PROMPTS), "everything was over before anything was changed"
    for thread in threads:
        thread.join(60)
    assert [answers[index] for index in range(len(PROMPTS))] == alone


def test_the_log_says_what_needs_a_restart_and_what_is_wrong(server: Server) -> None:
    before = ask(server.admin, "GET")
    server.write("depth = 2\nmax_waiting = 7\nkv_admission = 'peak'")
    text = server.hang_up("needs a restart")
    assert "needs a restart: depth" in text
    assert "kv_admission 'optimistic' -> 'peak'" in text
    assert "max_waiting" not in text  # a flag says otherwise, and flags win
    assert ask(server.admin, "GET")[1]["max_waiting"] == before[1]["max_waiting"] == 500
    now = ask(server.admin, "GET")
    for more, words in [
        ("kv_admission = 'hopeful'", "kv_admission is 'hopeful'; allowed: optimistic, peak, reserve"),
        ("max_chunk_tokens = 1.5", "allowed: a whole number"),
        ("colour = 'red'", "unknown key 'colour'"),
        ("kv_admission =", "is broken"),
    ]:
        server.write(more)
        assert words in server.hang_up("SIGHUP: nothing was changed")
    server.write("kv_admission = 'peak'")
    server.hang_up("SIGHUP: the configuration is as it was")
    assert ask(server.admin, "GET") == now
    status, answer = ask(server.admin, "PATCH", {"max_num_seqs": 7})
    assert status == 400
    assert "allowed: up to 6, the slots it started with" in answer["error"]["message"]
    assert server.complete(PROMPTS[0]) == server.complete(PROMPTS[0])
