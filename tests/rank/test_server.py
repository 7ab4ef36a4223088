"""The whole server with policy ltr: what it learned while serving is in its file when it has ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import echo_child
from headway.rank.model import load
from serve.test_run import Server, model_directory

SCRIPT = """
import sys
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.serve.run import run
model, state, child = sys.argv[1:]
engine = EngineConfig.of(model=model, max_model_len=100_000, policy="ltr", rank_state=state)
sys.exit(run(ServeConfig(engine, ServerConfig(port=0, shutdown_grace_s=5.0)), command=(child,)))
"""


def start(tmp_path: Path, state: Path) -> subprocess.Popen[str]:
    model = tmp_path / "model"
    if not model.exists():
        model_directory(model)
    command = [sys.executable, "-c", SCRIPT, str(model), str(state), echo_child.__file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_server_saves_what_it_learned(tmp_path: Path) -> None:
    state = tmp_path / "ranker.npz"
    with start(tmp_path, state) as process:
        server = Server(process)
        connection = server.connect()
        for number in range(130):
            body = {"prompt": [65 + number % 2, 66], "max_tokens": 2 + 6 * (number % 2), "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            assert connection.getresponse().read()
        connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, process.stderr and process.stderr.read()
    model, _ = load(state)
    assert model.dense.any()


def test_a_server_refuses_a_file_that_is_no_state(tmp_path: Path) -> None:
    state = tmp_path / "ranker.npz"
    state.write_text("no")
    with start(tmp_path, state) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.strip().splitlines()[-1].startswith(f"headway: {state} is not a ranker's state")
