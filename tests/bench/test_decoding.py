"""`bench decoding` on a tiny model: what it compares and prints; nothing here says how fast anything is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.bench import adapted, decoding, speculation
from headway.bench.in_turns import Timed
from headway.bench.setup import ModelSetup
from headway.cli.main import main
from headway.errors import ConfigError, EngineError

Last = Callable[[], dict[str, Any]]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_TOKENS", 12)
    monkeypatch.setattr(decoding, "_ROWS", 4)


def test_half_the_rows_held_are_compared_with_none(flags: list[str], last_line: Last) -> None:
    command = ["bench", "decoding", "--case", "grammar", "--rounds", "2", "--json", *flags]
    assert main(command, {}) == 0
    record = last_line()
    assert [row["case"] for row in record["rows"]] == ["grammar, text", "grammar, records"]
    assert all(row["rows"] == 4 and len(row["ratios"]) == 2 for row in record["rows"])
    first = record["rows"][0]
    assert first["ratio"] == pytest.approx(sum(first["ratios"]) / 2, abs=0.002)
    assert min(first["ratios"]) * first["base_tok_s"] * 0.5 < first["tok_s"]


def test_speculation_is_compared_kind_by_kind_and_at_many_rows(
    flags: list[str], last_line: Last, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "_TOKENS", 8)
    monkeypatch.setattr(speculation, "_ROWS", (3,))
    monkeypatch.setattr(speculation, "_CONTEXT", 60)
    monkeypatch.setattr(speculation, "EDITS", ["one two one two"])
    monkeypatch.setattr(speculation, "QUOTES", ["one two one two"])
    command = ["bench", "decoding", "--case", "speculation", "--case", "verify", "--rounds", "2", "--json"]
    assert main([*command, *flags], {}) == 0
    rows = last_line()["rows"]
    assert [(row["case"], row["rows"]) for row in rows] == [
        ("speculation, edit", 1),
        ("speculation, quote", 1),
        ("speculation, code", 1),
        ("speculation, chat", 1),
        ("speculation, chat", 3),
        ("steps of 4 tokens behind 60", 1),
    ]
    assert all(len(row["ratios"]) == 2 and min(row["ratios"]) > 0 for row in rows)


def test_adapters_of_each_rank_are_compared_with_none(
    flags: list[str], last_line: Last, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted, "_TOKENS", 6)
    assert main(["bench", "decoding", "--case", "adapters", "--rounds", "2", "--json", *flags], {}) == 0
    rows = last_line()["rows"]
    wanted = ["1 adapter of rank 8", "8 adapters of rank 8", "1 adapter of rank 16", "8 adapters of rank 16"]
    assert [row["case"] for row in rows] == wanted
    assert all(row["rows"] == 8 and len(row["ratios"]) == 2 and min(row["ratios"]) > 0 for row in rows)


def test_a_speculation_that_changes_a_token_is_no_measurement(
    setup: ModelSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_in_turns = speculation.step_in_turns

    def changed(runs: list[Timed]) -> None:
        step_in_turns(runs)
        runs[1].tokens[0][0] += 1

    monkeypatch.setattr(speculation, "EDITS", ["one two one two"])
    monkeypatch.setattr(speculation, "QUOTES", ["one two one two"])
    monkeypatch.setattr(speculation, "step_in_turns", changed)
    with pytest.raises(EngineError, match="speculation changed a token"):
        decoding.run(setup, case=["speculation"], rounds=1)


def test_an_answer_that_ends_early_is_no_measurement(setup: ModelSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decoding.SCHEMAS, "text", {"type": "boolean"})
    with pytest.raises(EngineError, match="ended early"):
        decoding.run(setup, case=["grammar"], rounds=1)


def test_a_case_that_there_is_not_is_refused(setup: ModelSetup) -> None:
    with pytest.raises(ConfigError, match="no case 'x'; there are: grammar, speculation, verify, adapters"):
        decoding.run(setup, case=["x"])
