"""The whole server with a ranker or a request log: what it learned, and what it learned from, is there when it ends."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from serve.test_run import Server, model_directory

import echo_child
from headway.cli.main import main
from headway.rank.log import read_log
from headway.rank.model import load

SCRIPT = """
import json, sys
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.serve.run import run
model, options, child = sys.argv[1:]
engine = EngineConfig.of(model=model, max_model_len=100_000, **json.loads(options))
sys.exit(run(ServeConfig(engine, ServerConfig(port=0, shutdown_grace_s=5.0)), command=(child,)))
"""


def start(tmp_path: Path, **options: object) -> subprocess.Popen[str]:
    model = tmp_path / "model"
    if not model.exists():
        model_directory(model)
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(options), echo_child.__file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], count: int) -> None:
    """So many requests, short and long in turn, then the end of the server."""
    connection = Server(process).connect()
    for number in range(count):
        body = {"prompt": [65 + number % 2, 66], "max_tokens": 2 + 6 * (number % 2), "temperature": 0, "user": "ann"}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().read()
    connection.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, process.stderr and process.stderr.read()


def test_a_server_saves_what_it_learned(tmp_path: Path) -> None:
    state = tmp_path / "ranker.npz"
    with start(tmp_path, policy="ltr", rank_state=str(state)) as process:
        ask(process, 130)
    model, _ = load(state)
    assert model.dense.any()


def test_a_server_refuses_a_file_that_is_no_state(tmp_path: Path) -> None:
    state = tmp_path / "ranker.npz"
    state.write_text("no")
    with start(tmp_path, policy="ltr", rank_state=str(state)) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.strip().splitlines()[-1].startswith(f"headway: {state} is not a ranker's state")


def test_every_answered_request_is_in_the_log_and_the_log_teaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, state = tmp_path / "requests.jsonl", tmp_path / "ranker.npz"
    with start(tmp_path, rank_log=str(log)) as process:  # under fcfs, which learns nothing itself
        ask(process, 200)
    entries = read_log(log)
    assert [entry.tokens for entry in entries] == [[65 + number % 2, 66] for number in range(200)]
    assert {(entry.num_output, entry.max_tokens, entry.finish) for entry in entries} == {
        (2, 2, "length"),
        (8, 8, "length"),
    }
    assert {(entry.tenant, entry.route, entry.temperature) for entry in entries} == {("ann", "completions", 0.0)}
    assert stat.S_IMODE(log.stat().st_mode) == 0o600, "prompts are readable by the owner only"
    assert main(["rank", "fit", str(log), "--state", str(state)], {}) == 0
    assert "learned from 200 requests" in capsys.readouterr().out
    assert load(state)[0].dense.any()


def test_a_log_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    log = tmp_path / "missing" / "requests.jsonl"
    with start(tmp_path, rank_log=str(log)) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    said = errors.strip().splitlines()[-1]
    assert said == f"headway: cannot write the request log {log}: No such file or directory; choose another file"
