"""A .venv from before the distributions were renamed: the old ones go, and nothing of theirs stays behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_wheels import write_wheel

ROOT = Path(__file__).resolve().parents[1]


def installed(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"
    words = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return dict(word.split("=") for word in words)  # type: ignore[misc]


def test_the_old_distributions_are_removed_once_and_said_so(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    files = {"headway": {"_headway.pth": "/clone/src\n"}, "headway-kernels": {"headway_kernels/__init__.py": ""}}
    wheels = [write_wheel(tmp_path, name, "0.1.0", own) for name, own in files.items()]
    wheels.append(write_wheel(tmp_path, "other", "1.0"))
    pip = [venv / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, *wheels], check=True)
    assert {"headway", "headway-kernels", "other"} <= installed(venv / "bin/python").keys()

    script = f"source {ROOT}/scripts/lib/venv.sh; VENV={venv}; drop_old_names"
    first, again = (subprocess.run(["bash", "-ec", script], check=True, capture_output=True, text=True) for _ in "12")

    assert installed(venv / "bin/python").keys() - {"pip", "setuptools"} == {"other"}
    assert not list(venv.rglob("*headway*"))
    assert "removing headway headway-kernels from .venv" in first.stderr
    assert again.stderr == ""
