"""Which build of torch the scripts install: real pip over package indexes in folders, with packages of a few bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_wheels import write_index

ROOT = Path(__file__).resolve().parents[1]
PIN = next(
    line.removeprefix("torch==") for line in (ROOT / "requirements/torch.txt").read_text().splitlines() if "==" in line
)
DEFAULT, CPU = PIN, f"{PIN}+cpu"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def install(venv: Path, ours: str, theirs: str) -> tuple[int, str, str]:
    """(exit status, version of torch afterwards, what was said)."""
    pip = [str(venv / "bin/python"), "-m", "pip"]
    subprocess.run([*pip, "uninstall", "-y", "-q", "torch"], check=True, capture_output=True)
    script = f"source {ROOT}/scripts/lib/venv.sh; VENV={venv}; BUSY={venv}/busy; install_torch"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = {**clean, "PIP_INDEX_URL": ours, "TORCH_CPU_INDEX": theirs, "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    found = [line.partition("==")[2] for line in listed.splitlines() if line.startswith("torch==")]
    return done.returncode, "".join(found), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the only build is one for the CPU")
@pytest.mark.parametrize(
    ("ours", "theirs", "status", "found", "words"),
    [
        ((DEFAULT, CPU), (), 0, CPU, "installing torch for the CPU"),
        ((DEFAULT,), (CPU,), 0, CPU, "the package index has no"),
        ((DEFAULT,), (DEFAULT,), 1, "", "there is no build of torch for the CPU"),
    ],
    ids=["the index in use", "torch's own index", "none"],
)
def test_only_a_build_for_the_cpu_is_taken(
    venv: Path, tmp_path: Path, ours: tuple[str, ...], theirs: tuple[str, ...], status: int, found: str, words: str
) -> None:
    got = install(
        venv, write_index(tmp_path / "ours", "torch", ours), write_index(tmp_path / "theirs", "torch", theirs)
    )
    assert got[:2] == (status, found), got[2]
    assert words in got[2]
