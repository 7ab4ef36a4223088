"""The generic level alone, as it is built where the processor is not x86-64: compiled without a warning, and run.

With the compiler of this machine, with clang, which macOS has, and for arm64 where a cross compiler and qemu are.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2] / "kernels"
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("compiler", "machine", "run"),
    [
        (os.environ.get("CXX", "g++"), "any", ()),
        ("clang++", "any", ()),
        ("aarch64-linux-gnu-g++", "aarch64", QEMU),
    ],
    ids=["this machine", "clang", "arm64"],
)
def test_the_generic_level_compiles_alone_and_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, machine: str, run: tuple[str, ...]
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    monkeypatch.syspath_prepend(str(ROOT))
    program = module(ROOT / "tests/sanitize.py").compile_driver(compiler, tmp_path, machine=machine)
    if run and shutil.which(run[0]) is None:
        pytest.skip(f"it compiled; there is no {run[0]} to run it")
    done = subprocess.run([*run, str(program), "1", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "level 0: 1 rounds of seed 1\n"), done.stderr


@pytest.mark.parametrize(
    ("python", "machine", "tag"),
    [
        ("linux-x86_64", "x86_64", "linux_x86_64"),
        ("linux-aarch64", "aarch64", "linux_aarch64"),
        ("macosx-14.0-arm64", "arm64", "macosx_14_0_arm64"),
        ("macosx-10.13-universal2", "arm64", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "x86_64", "macosx_10_15_x86_64"),
    ],
)
def test_a_wheel_names_the_one_machine_its_library_is_for(python: str, machine: str, tag: str) -> None:
    assert module(ROOT / "build_library.py").wheel_platform(python, machine) == tag


def test_only_x86_gets_its_levels() -> None:
    builder = module(ROOT / "build_library.py")
    assert builder.units_for("arm64") == builder.units_for("aarch64") == builder.PORTABLE
    assert {"level_avx2.cpp", "level_generic.cpp"} < builder.units_for("AMD64").keys()
