"""The key that clients must send is seen by the process that checks it, and by none that it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tiny_dir import write_tiny_model

KEY = "sesame-4711"


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def engine_of(pid: int) -> int:
    found: list[int] = []
    deadline = time.monotonic() + 20
    while not found:
        assert time.monotonic() < deadline, "there is no engine process"
        for child in children(pid):
            with suppress(OSError):  # it has just ended
                if b"engine_child" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return found[0]


def test_no_child_has_the_key_and_a_reload_still_knows_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    config = tmp_path / "headway.toml"
    config.write_text("[cache]\nnum_blocks = 100\n")
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(tmp_path / "tiny"), "--port", "0"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--threads", "1", "--config", str(config)]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        environ = {**os.environ, "HEADWAY_API_KEY": KEY}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ)
    with process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, log.read_text()
            engine = engine_of(process.pid)
            assert len(children(process.pid)) == 2  # the template's too
            for child in children(process.pid):
                assert KEY.encode() not in Path(f"/proc/{child}/environ").read_bytes()
            os.kill(engine, signal.SIGKILL)
            while (second := engine_of(process.pid)) == engine:
                time.sleep(0.01)
            assert KEY.encode() not in Path(f"/proc/{second}/environ").read_bytes()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{found.group()}/v1/models")
            while "is up" not in log.read_text():
                time.sleep(0.01)
            process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 20
            while "SIGHUP" not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            assert "api_key" not in log.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
