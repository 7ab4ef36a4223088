"""`headway serve` as processes over a tiny model: what they see, and what outlives the engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import children_of, command_of
from tiny_dir import write_tiny_model

KEY = "sesame-4711"


def engine_of(pid: int) -> int:
    found: list[int] = []
    deadline = time.monotonic() + 20
    while not found:
        assert time.monotonic() < deadline, "there is no engine process"
        found += [child for child in children_of(pid) if "engine_child" in command_of(child)]
    return found[0]


@contextmanager
def served(folder: Path, *arguments: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A server over a tiny model: process, URL, log. It gets SIGTERM at the end and has to end well."""
    write_tiny_model(folder / "tiny")
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(folder / "tiny"), "--port", "0", *arguments]
    command += ["--cache-dir", str(folder / "cache"), "--threads", "1"]
    log = folder / "log"
    with log.open("w") as stderr:
        seen = {**os.environ, **environ}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=seen)
    with process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, log.read_text()
            yield process, found.group(), log
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def replace_engine(process: subprocess.Popen[str], log: Path) -> int:
    """Kill the engine; the process id of the next one, which is ready."""
    engine = engine_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    while (second := engine_of(process.pid)) == engine:
        time.sleep(0.01)
    while "is up" not in log.read_text():
        time.sleep(0.01)
    return second


def test_the_step_log_goes_on_when_the_engine_is_replaced(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.write_text("of another server\n")
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode()
    with served(tmp_path, "--step-log", str(steps)) as (process, url, log):
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(asked).read()
        before = steps.read_text()
        assert before.startswith('{"event"')
        replace_engine(process, log)
        urllib.request.urlopen(asked).read()
        assert steps.read_text().startswith(before)
        assert len(steps.read_text()) > len(before)


def test_no_child_has_the_key_and_a_reload_still_knows_it(tmp_path: Path) -> None:
    config = tmp_path / "headway.toml"
    config.write_text("[cache]\nnum_blocks = 100\n")
    with served(tmp_path, "--config", str(config), HEADWAY_API_KEY=KEY) as (process, url, log):
        engine_of(process.pid)
        assert len(children_of(process.pid)) == 2  # the template's too
        for child in children_of(process.pid):
            assert KEY.encode() not in Path(f"/proc/{child}/environ").read_bytes()
        second = replace_engine(process, log)
        assert KEY.encode() not in Path(f"/proc/{second}/environ").read_bytes()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/models")
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while "SIGHUP" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        assert "api_key" not in log.read_text()
