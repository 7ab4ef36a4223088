"""The admin endpoint over its real socket: what it shows, changes and refuses, and its access rights."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import echo_child
from serve_harness import model_directory
from unix_http import UnixConnection, ask

SCRIPT = """
import sys
from headway.config import EngineConfig, ServeConfig, ServerConfig
from headway.serve.run import run
model, admin, child = sys.argv[1:]
engine = EngineConfig.of(model=model, max_model_len=100_000)
sys.exit(run(ServeConfig(engine, ServerConfig(port=0, admin_socket=admin)), command=(child,)))
"""
AT_START = {"max_num_seqs": 64, "target_itl_ms": None, "beta": 20.0}


@contextmanager
def started(folder: Path, admin: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(admin), str(Path(echo_child.__file__))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def address(process: subprocess.Popen[str]) -> str:
    """Host and port, once it is ready."""
    assert process.stdout is not None
    found = re.search(r"http://(\S+)", process.stdout.readline())
    assert found
    return found.group(1)


def test_settings_are_shown_and_changed_and_the_socket_goes_with_the_server(tmp_path: Path) -> None:
    admin = tmp_path / "admin.sock"
    with started(model_directory(tmp_path / "echo"), admin) as process:
        netloc = address(process)
        assert admin.stat().st_mode & 0o777 == 0o600
        assert ask(admin, "GET") == (200, AT_START)
        changed = {**AT_START, "beta": 3.5, "target_itl_ms": 40}
        assert ask(admin, "PATCH", {"beta": 3.5, "target_itl_ms": 40}) == (200, changed)
        for body, words in [
            ({"gamma": 1}, "nothing was changed: 'gamma' is no setting; allowed: max_num_seqs"),
            ({"max_num_seqs": 10**30}, "nothing was changed: "),
            ({"beta": [1]}, "the body is not an object of settings"),
            ([1], "the body is not an object of settings"),
            (b"{", 'send one such as {"target_itl_ms": 40}'),
            (b"\xff", "not an object"),
        ]:
            status, answer = ask(admin, "PATCH", body)
            assert status == 400
            assert words in answer["error"]["message"]
        assert ask(admin, "GET") == (200, changed)
        assert ask(admin, "POST", {})[0] == 405
        assert ask(admin, "GET", url="/v1/models")[0] == 404
        public = http.client.HTTPConnection(netloc, timeout=20)
        public.request("GET", "/config")
        assert public.getresponse().status == 404  # the API itself knows no such path
        public.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not admin.exists()


def test_an_idle_admin_connection_does_not_hold_up_the_end(tmp_path: Path) -> None:
    admin = tmp_path / "admin.sock"
    with started(model_directory(tmp_path / "echo"), admin) as process:
        address(process)
        connection = UnixConnection(admin)
        connection.request("GET", "/config")
        assert json.loads(connection.getresponse().read()) == AT_START
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        connection.close()


def test_a_socket_left_by_a_killed_server_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    admin = tmp_path / "admin.sock"
    folder = model_directory(tmp_path / "echo")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(admin))
    with started(folder, admin) as process:
        address(process)
        assert ask(admin, "GET")[0] == 200
        with started(folder, admin) as second:
            assert second.wait(20) == 2
            assert second.stderr is not None
            assert "another server listens there; choose another path" in second.stderr.read()
        assert ask(admin, "GET")[0] == 200


@pytest.mark.parametrize("name", ["here", "missing/admin.sock"])
def test_a_path_that_cannot_be_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").write_text("precious")
    with started(model_directory(tmp_path / "echo"), tmp_path / name) as process:
        assert process.wait(20) == 2
        assert process.stderr is not None
        assert "cannot make the admin socket" in process.stderr.read()
    assert (tmp_path / "here").read_text() == "precious"
