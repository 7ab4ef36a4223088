"""A server of several replicas as its users and its operator see it: HTTP, the admin socket, the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import unix_http
from raw_http import call
from server_process import server_process

NUM_TOKENS = 400


def complete(url: str, prompt: str, found: dict[str, tuple[int, dict[str, object]]]) -> None:
    body = {"model": "echo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    found[prompt] = call(url, "POST", "/v1/completions", body)[:2]


def test_answers_survive_kills_and_a_rolling_restart(tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    engine = {"max_model_len": 4096}
    with server_process(tmp_path, engine=engine, replicas=3, admin_socket=str(admin)) as server:
        found: dict[str, tuple[int, dict[str, object]]] = {}
        prompts = [f"abc{number} " for number in range(9)]
        asking = [threading.Thread(target=complete, args=(server.url, prompt, found)) for prompt in prompts]
        for thread in asking:
            thread.start()
        status, before = unix_http.ask(admin, "GET", url="/replicas")
        assert (status, [row["is_up"] for row in before]) == (200, [True] * 3)
        os.kill(before[1]["pid"], signal.SIGKILL)
        status, after = unix_http.ask(admin, "POST", url="/restart")
        assert status == 200
        assert not {row["pid"] for row in before} & {row["pid"] for row in after}
        for thread in asking:
            thread.join()
        for prompt in prompts:
            status, answer = found[prompt]
            assert status == 200, answer
            text = answer["choices"][0]["text"]  # type: ignore[index]
            assert text == (prompt * NUM_TOKENS)[: len(text)]
            assert answer["usage"]["completion_tokens"] == NUM_TOKENS  # type: ignore[index]
        assert server.metric("headway_engine_restarts_total") >= 3
        assert server.metric("headway_replica_requests") == 0


def test_a_request_that_comes_while_no_replica_is_up_waits_for_one(tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    with server_process(tmp_path, replicas=2, admin_socket=str(admin)) as server:
        _, rows = unix_http.ask(admin, "GET", url="/replicas")
        for row in rows:
            os.kill(row["pid"], signal.SIGKILL)
        while call(server.url, "GET", "/ready")[0] == 200:
            time.sleep(0.002)
        status, answer, _ = call(server.url, "POST", "/v1/completions", {"model": "echo", "prompt": "abc"})
        assert status == 200, answer


def test_a_route_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headway.cli.main",
        "serve",
        "--port",
        "0",
        "--replicas",
        "2",
        "--route",
        "nearest",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "nearest" in done.stderr
    assert "least_loaded" in done.stderr
