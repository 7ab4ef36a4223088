"""Machines that have a device and little else: benches and doctor run where the command line's packages are missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.bench import __main__ as bench
from tiny_dir import write_tiny_model

HOOK = """
import sys
REFUSED = {"cyclopts", "msgspec", "rich", "jinja2", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client"}

class Few:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Few())
"""
DEVICE = ("device", "device_kernels", "device_open", "device_quality", "device_serve", "device_swap")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(HOOK)
    return os.pathsep.join([str(site), *filter(None, sys.path)])


def run(path: str, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_doctor(path: str, tmp_path: Path) -> None:
    sections = json.loads(run(path, "headway.cli.machine", "--json", "--cache-dir", str(tmp_path)))
    assert set(sections) == {"machine", "installed", "models", "will use"}
    assert "device cuda" in sections["will use"]
    assert "cpu features" in run(path, "headway.cli.machine")


def test_a_bench_of_a_model(path: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    model = ("--model", str(tmp_path / "model"), "--cache-dir", str(tmp_path / "cache"), "--threads", "1")
    lines = run(path, "headway.bench", "offline", "--requests", "2", "--rounds", "1", "--json", *model).splitlines()
    assert json.loads(lines[-1])["n"] == 2
    (header,) = (line for line in lines if line.startswith("engine "))
    (values,) = (line for line in lines if line.startswith("continuous "))
    assert len(header.split()) == len(values.split())


def test_a_bench_without_a_model_and_with_cases(path: str) -> None:
    assert "0 do not hold" in run(path, "headway.bench", "policy", "--case", "fixture", "--seed", "3")


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_bench_has_the_flags_of_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from headway.cli.main import main

    with pytest.raises(SystemExit):
        bench.main([name, "--help"])
    here = {word for word in capsys.readouterr().out.replace("]", " ").split() if word.startswith("--")}
    main(["bench", name, "--help-all"], {})
    there = {word for word in capsys.readouterr().out.split() if word.startswith("--")}
    assert here - {"--help"} <= there
    assert len(here) > 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="these benches import the kernels")
@pytest.mark.parametrize("name", DEVICE)
def test_benches_of_a_device_start(path: str, name: str) -> None:
    assert "--" in run(path, f"headway.bench.{name}", "--help")


def test_what_cannot_be_run_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["offline", "--requests", "0"]) == 2
    assert "requests is 0; allowed: 1 or more" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this bench imports the kernels")
def test_a_bench_of_a_device_says_that_there_is_none(path: str) -> None:
    asked = [sys.executable, "-m", "headway.bench.device_kernels"]
    done = subprocess.run(
        asked, env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "headway.bench: device is 'cuda', but torch sees no CUDA device; allowed here: cpu\n"
