"""`scripts/fuzz`: a few scenarios pass, a planted bug does not, and a failing seed says how to run it again."""

from __future__ import annotations

import pytest

import fuzz
from headway.kv.blocks import BlockPool


def test_a_few_scenarios_under_every_policy_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--scenarios", "64", "--seed", "100000"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 64 scenarios failed" in printed
    for what in ("loads", "forks", "preemptions", "swapped out", "chunks with drafts", "ends by abort"):
        assert f" {what}" in printed


def test_a_planted_bug_is_found_and_its_seed_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BlockPool, "take_settled", BlockPool.take)
    assert fuzz.main(["--scenarios", "100", "--policies", "fcfs"]) == 1
    assert "scripts/fuzz --seed" in capsys.readouterr().out
