"""The native engine where torch cannot be imported, in every process, and what is said where torch is needed.

A `sitecustomize` on the path refuses torch in each Python process and writes down who asked for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import no_torch
from headway.bench.server import ServerProcess
from headway.kernels.library import cpu_level
from tiny_dir import write_tiny_model

native = pytest.mark.skipif(cpu_level() == "none", reason="there are no native kernels")


class Bare:
    """An environment without torch, with a tiny model in it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.model = folder / "model"
        self.options = ("--model", str(self.model), "--cache-dir", str(folder / "cache"), "--threads", "1")
        site = folder / "site"
        no_torch.install(site, self.log)
        self.path = os.pathsep.join([str(site), *filter(None, sys.path)])
        write_tiny_model(self.model)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": self.path}
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)

    def headway(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "headway.cli.main", *command)

    def noted(self, what: str) -> list[str]:
        return no_torch.noted(self.log, what)


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path)


@native
def test_generate_needs_no_torch(bare: Bare) -> None:
    done = bare.headway("generate", "hello", "--max-tokens", "4", "--temperature", "0", "--json", *bare.options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["token_ids"]
    assert bare.noted("starts")
    assert not bare.noted("asks")


@native
def test_llm_needs_no_torch_in_any_format(bare: Bare) -> None:
    lines = (
        "import sys",
        "from headway import LLM, SamplingParams",
        "for dtype in ('float32', 'bfloat16', 'int8', 'q4'):",
        f"    llm = LLM({str(bare.model)!r}, dtype=dtype, cache_dir={str(bare.log.parent / 'cache')!r}, threads=1)",
        "    for temperature in (0.0, 1.0):",
        "        answer = llm.generate('hi', SamplingParams(max_tokens=3, temperature=temperature, seed=1))[0]",
        "        assert len(answer.outputs[0].token_ids) <= 3",
        "    llm.close()",
        "assert 'torch' not in sys.modules",
    )
    done = bare.run("-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert not bare.noted("asks")


@native
def test_serve_needs_no_torch_in_any_process(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", bare.path)
    with ServerProcess(bare.options) as server:
        body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()
        name = json.load(urllib.request.urlopen(f"{server.url}/v1/models"))["data"][0]["id"]
        body = body.replace(b'"m"', json.dumps(name).encode())
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
    assert len(bare.noted("starts")) >= 2, "the server and the process of its engine"
    assert not bare.noted("asks")


@native
def test_doctor_and_bench_offline_need_no_torch(bare: Bare) -> None:
    bench = ("bench", "offline", "--requests", "2", "--engine", "continuous,static2", *bare.options)
    for command in (("doctor",), bench):
        done = bare.headway(*command)
        assert done.returncode == 0, done.stderr
    assert not bare.noted("asks")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kernels", "ref"), r"kernels = ref needs torch, which is not installed.*pip install -e '.[torch]' in "),
        (("--device", "cuda"), r"backends cuda needs torch, which is not installed.*pip install -e '.[cuda]' in "),
    ],
)
def test_what_needs_torch_names_the_extra(bare: Bare, options: tuple[str, ...], words: str) -> None:
    done = bare.headway("generate", "hello", *options, *bare.options)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    for part in words.split(".*"):
        assert part in said
    assert "Traceback" not in said
    assert bare.noted("asks")
