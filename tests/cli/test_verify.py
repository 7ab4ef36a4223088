"""`headway verify`: the table for a right model, status 1 for planted faults, status 2 for what is no model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import gguf_files
from headway.bench import reference
from headway.bench.verify import COMPANY
from headway.cli.main import main
from headway.kernels import ref
from headway.kernels.ops import KernelSet
from tiny_dir import write_tiny_model

Floats = NDArray[np.float32]
INVARIANCE = ["alone again", "in company", "chunked prefill", "prefix cached", "preempted", "all at once"]
AGAINST = ["transformers tokens", "transformers logits"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def arguments(model: Path, *more: str) -> list[str]:
    fields = {"cache-dir": str(model.parent / "cache"), "threads": "1", "prompts": "3", "tokens": "6"}
    fields |= dict(option.lstrip("-").split("=") for option in more)
    return ["verify", str(model), "--json", *(f"--{name}={value}" for name, value in fields.items())]


def verify(capsys: pytest.CaptureFixture[str], model: Path, *more: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit status, and the rows of the result by their checks."""
    status = main(arguments(model, *more), {})
    lines = capsys.readouterr().out.splitlines()
    return status, {row["check"]: row for row in json.loads(lines[-1])["rows"]}


def faulty(rows: dict[str, dict[str, object]]) -> set[str]:
    return {check for check, row in rows.items() if row["differing"]}


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_a_right_model_passes_every_check(capsys: pytest.CaptureFixture[str], model: Path, dtype: str) -> None:
    status, rows = verify(capsys, model, f"--dtype={dtype}")
    assert (status, list(rows)) == (0, [*AGAINST, *INVARIANCE])
    assert {row["verdict"] for check, row in rows.items() if check != "transformers logits"} == {"equal"}
    assert 0 < float(str(rows["transformers logits"]["max_error"])) < 1e-4
    assert rows["transformers tokens"]["compared"] == "18 tokens"
    assert all(int(str(rows[check]["compared"]).split()[0]) >= 18 for check in INVARIANCE)


def test_a_gguf_file_prints_a_table_through_the_command_line(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "tiny.gguf", *gguf_files.tiny_model("qwen3"))
    command = [sys.executable, "-m", "headway.cli.main", *arguments(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].split() == ["check", "compared", "differing", "verdict"]


def test_a_changed_weight_differs_from_transformers_and_from_nothing_else(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    assert verify(capsys, model, "--dtype=float32")[0] == 0
    (packed,) = (model.parent / "cache").rglob("weights-*")  # what headway computes with; transformers reads the model
    raw = np.fromfile(packed, np.uint8)
    raw[-4096:] = np.full(1024, 0.25, np.float32).view(np.uint8)
    raw.tofile(packed)
    status, rows = verify(capsys, model, "--dtype=float32")
    assert status == 1
    assert faulty(rows) >= {"transformers logits"}
    assert not faulty(rows) & set(INVARIANCE)


def test_a_kernel_that_looks_at_its_batch_is_found(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ref.load()

    def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
        return right.rms_norm(x, weight, eps) * (1.0 if len(x) != 3 + COMPANY else 1.0 + 2**-20)

    def load() -> KernelSet:
        return replace(right, rms_norm=rms_norm)

    monkeypatch.setattr(ref, "load", load)
    status, rows = verify(capsys, model, "--kernels=ref", "--dtype=float32", "--against=none")
    assert status == 1
    assert "in company" in faulty(rows)
    assert not faulty(rows) & {"alone again", "chunked prefill", "prefix cached"}


def test_without_transformers_it_says_so_and_runs_the_rest(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda name: None if name == "transformers" else object())
    status, rows = verify(capsys, model)
    assert (status, list(rows)) == (0, ["transformers", *INVARIANCE])
    assert rows["transformers"]["verdict"] == "not run: transformers is not installed"
    assert main(arguments(model, "--against=transformers"), {}) == 2, "who asks for it must not take silence for a pass"
    sentence = "transformers is not installed; install it by pip, or leave --against out to run the rest"
    assert capsys.readouterr().err == f"headway: against is 'transformers', but {sentence}\n"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--against=llama.cpp"], "against is 'llama.cpp'; allowed: transformers, none"),
        (["--prompts=0"], "prompts is 0; allowed: 1 or more"),
        (["--tokens=500"], "tokens is 500; this model's context of 512 leaves room for at most 479"),
    ],
)
def test_wrong_options_are_named(
    capsys: pytest.CaptureFixture[str], model: Path, more: list[str], sentence: str
) -> None:
    assert main(arguments(model, *more), {}) == 2
    assert capsys.readouterr().err == f"headway: {sentence}\n"


def test_what_is_no_model_ends_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    assert main(arguments(tmp_path / "bad.gguf"), {}) == 2
    assert main(arguments(tmp_path / "nothing"), {}) == 2
