"""`tools/fuzz_fetch.py`: a few schedules pass, and planted faults do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import fuzz_fetch
from headway.cluster import fetch_peers
from headway.cluster.fetch_peers import FetchPeers
from headway.engine.mover import BlockMover, Hold


def failures(count: int = 400) -> int:
    return len(fuzz_fetch.run_many((0, count))[2])


def test_a_few_schedules_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_fetch.main(["--schedules", "1200", "--processes", "1"]) == 0
    assert "0 of 1200 schedules failed" in capsys.readouterr().out


def test_a_flipped_bit_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_peers, "is_whole", lambda header, data: True)
    assert failures()


def test_memory_that_is_used_again_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(self: FetchPeers) -> memoryview:
        waiting = [each.data for each in self._arrivals if isinstance(each.data, memoryview)]
        return waiting[0] if waiting else memoryview(bytearray(self._block_bytes))

    monkeypatch.setattr(FetchPeers, "_memory", memory)
    assert failures()


def test_a_hold_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockMover, "drop", lambda self, id: None)
    assert failures()


def test_a_copy_of_blocks_that_were_given_on_is_known_to_be_one() -> None:
    """Schedules no longer come to this by themselves: what is kept for a request ends before its blocks are read."""
    mover: Any = SimpleNamespace(_executor=SimpleNamespace(read_block=lambda block, into: None))
    whole = Hold(1, [4, 5], 10.0)
    part, into = Hold(2, [5], 10.0, of=whole), memoryview(bytearray(1))
    assert BlockMover.copy_out(mover, part, 0, into)
    whole.is_valid = False
    assert not BlockMover.copy_out(mover, part, 0, into)
    assert not BlockMover.copy_out(mover, whole, 1, into)
