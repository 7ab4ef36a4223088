"""The native kernels at every level of this machine, for the tests of this folder.

Where the library is neither installed from these sources nor can be compiled, there are no sets to test and loading
must say so by None.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headway.kernels import library as library_file
from headway.kernels import native
from headway.kernels.ops import KernelSet
from torch_kernels import of_tensors

ROOT = Path(__file__).resolve().parents[2] / "kernels"


def build_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_library", ROOT / "build_library.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The oracle's many small operations would only fight the kernels' own threads for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library of these sources: the installed one if it is theirs, else one compiled for the tests."""
    builder = build_module()
    installed = library_file.find_library()
    if installed is not None:
        stamp = installed.with_name(builder.DIGEST)
        if stamp.is_file() and stamp.read_text().strip() == builder.source_digest(ROOT):
            return installed
    compiler = builder.find_compiler()
    return None if compiler is None else builder.build(ROOT, tmp_path_factory.mktemp("kernels"), compiler)


@pytest.fixture(scope="session")
def levels(library: Path | None) -> list[str]:
    """The levels this machine can run, none without a library."""
    if library is None:
        assert native.load(1) is None
        return []
    return list(library_file.LEVELS[: library_file.LEVELS.index(library_file.cpu_level(library)) + 1])


@pytest.fixture
def load(library: Path | None) -> Callable[[int, str], KernelSet]:
    def load_level(threads: int, level: str) -> KernelSet:
        kernels = native.load(threads, level, library)
        assert kernels is not None
        return of_tensors(kernels)

    return load_level


@pytest.fixture
def sets(levels: list[str], load: Callable[[int, str], KernelSet]) -> list[KernelSet]:
    """One set per level, on two threads."""
    torch.manual_seed(1)
    return [load(2, level) for level in levels]
