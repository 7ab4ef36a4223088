"""Small runs of `tools/chaos.py` on a tiny model: what it promises of the bundled one, it promises of any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import faulty_server
from chaos import Setup, Table, run
from tiny_dir import tiny_options, write_tiny_model


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("chaos")
    write_tiny_model(folder / "tiny")
    engine = tiny_options(folder / "tiny")
    seams = [seam for seam in faulty_server.SEAMS if seam != "hang"]  # slow; see tests/engine/test_supervisor.py
    return Setup(engine, folder, streams=8, kills=3, neighbours=10, max_tokens=32, back_s=3.0, stall_s=1.0, seams=seams)


@pytest.mark.parametrize("part", ["death", "drain", "faults"])
def test_every_answer_is_complete_and_right_whatever_happens_to_the_engine(setup: Setup, part: str) -> None:
    tables = run(setup, [part])
    assert [fault for table in tables for fault in table.faults] == []
    assert all(table.rows for table in tables)


def test_a_broken_promise_is_said_and_shown() -> None:
    table = Table("a table", ("one", "two"))
    table.add("good", [1, 2.5], {"late": True})
    table.add("bad", ["x", "y"], {"late": False, "leaked": False})
    assert table.faults == ["a table, bad: late", "a table, bad: leaked"]
    assert str(table).splitlines()[2:] == [
        "|      | one | two  | verdict      |",
        "|------|-----|------|--------------|",
        "| good | 1   | 2.50 | ok           |",
        "| bad  | x   | y    | late; leaked |",
    ]


def test_without_its_variable_there_is_no_server_that_fails_on_purpose() -> None:
    environ = {name: value for name, value in os.environ.items() if name != faulty_server.VARIABLE}
    command = [sys.executable, str(Path(faulty_server.__file__)), "{}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert faulty_server.VARIABLE in done.stderr
