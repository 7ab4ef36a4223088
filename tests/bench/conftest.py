"""What every test of a bench needs: a machine that is measured at once, a tiny model, the last line of output."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bench import attention, kernels, machine
from headway.bench.setup import ModelSetup
from tiny_dir import write_tiny_model


def _once(work: Callable[[], object], budget_s: float = 0.0, least: int = 1) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.fixture(autouse=True)
def _quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure everything once and on next to nothing: no test says how fast anything is."""
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(machine, "_TILES", ((8, 16, 16),))
    monkeypatch.setattr(machine, "CUBE", 64)
    monkeypatch.setattr(machine, "best_seconds", _once)
    monkeypatch.setattr(kernels, "COPIES_BYTES", 2**16)
    monkeypatch.setattr(attention, "CASES", ((2, 1, 20), (1, 8, 8)))


@pytest.fixture
def setup(tmp_path: Path) -> ModelSetup:
    """A tiny model in float32 on one thread."""
    write_tiny_model(tmp_path / "tiny", max_len=1024)
    cache = str(tmp_path / "cache")
    return ModelSetup(model=str(tmp_path / "tiny"), dtype="float32", kv_dtype="float32", threads=1, cache_dir=cache)


@pytest.fixture
def flags(setup: ModelSetup) -> list[str]:
    """The same as flags of the command line."""
    return setup.flags()


@pytest.fixture
def last_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """The object on the last line of what was printed."""

    def read() -> dict[str, Any]:
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(record, dict)
        return record

    return read
