"""What must not be in the package: code that runs what it reads, and dependencies that float."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Reading any of these can run code; `eval` of a torch module is a method and not meant.
FORBIDDEN = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|dill|cloudpickle|marshal|shelve)\b|torch\.load\(|yaml\.load\(|(?<![\w.])(?:eval|exec)\("
)


def faults(text: str) -> list[str]:
    return [line for line in text.splitlines() if FORBIDDEN.search(line)]


@pytest.mark.parametrize(
    "line", ["import pickle", "from dill import load", "x = eval(y)", "torch.load(p)", "  exec(code)"]
)
def test_each_of_them_is_found(line: str) -> None:
    assert faults(line)


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    found = {str(path): faults(path.read_text()) for path in (ROOT / "src").rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_every_requirement_is_exact(path: Path) -> None:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    loose = [line for line in lines if line and not line.startswith("-") and "==" not in line]
    assert loose == []
