"""Log lines without a reader hold nothing up, and those that are read are complete, in order and all there."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
from headway import logs
logs.set_up("server", "info", "text")
for number in range({count}):
    logging.getLogger("headway.some").info("line %d %s", number, "x" * 100)
print("done", flush=True)
if {has_more}:
    sys.stdin.readline()
    logging.getLogger("headway.some").info("the last one")
"""


def start(count: int, *, has_more: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT.format(count=count, has_more=has_more)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_pipe_without_a_reader_holds_nothing_up() -> None:
    process = start(20_000)
    try:
        assert process.stdout is not None
        process.wait(60)
        assert process.returncode == 0
        assert process.stdout.read() == "done\n"
    except subprocess.TimeoutExpired:
        pytest.fail("it waits for a reader of its log")
    finally:
        process.kill()
        process.communicate()


def test_what_was_left_out_is_counted_once_there_is_a_reader() -> None:
    process = start(20_000, has_more=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "done\n"
    told = 0
    while told < 20_000 and (line := process.stderr.readline()):
        told += 1 if ": line " in line else int(line.split(" log lines were left out")[0].split()[-1])
    assert told == 20_000
    _, said = process.communicate("go on\n", timeout=60)
    assert said.endswith("the last one\n")


def test_every_line_is_there_when_the_process_ends() -> None:
    _, said = start(500).communicate(timeout=60)
    assert [int(line.split()[6]) for line in said.splitlines()] == list(range(500))
