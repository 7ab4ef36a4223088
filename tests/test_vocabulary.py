"""The check of the glossary finds what it is for: retired words in names and prose, classes of one name."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_vocabulary import INSTEAD, faults, names, parts, prose, repeated_classes, retired


def test_the_tree_is_clean() -> None:
    assert faults() == []


@pytest.mark.parametrize("word", sorted(INSTEAD))
def test_a_retired_word_is_found_in_any_name(word: str) -> None:
    assert list(retired(f"num_{word}_of", "config.py"))
    assert list(retired(f"My{word.title()}", "config.py"))


def test_an_allowed_meaning_is_allowed_where_it_is_meant_alone() -> None:
    assert not list(retired("num_cells", "kernels/native_kv.py"))
    assert list(retired("num_cells", "core/ledger.py"))
    assert not list(retired("in_flight", "core/state.py"))


def test_names_are_split_into_words() -> None:
    assert parts("_ItlTarget") == ["itl", "target"]
    assert parts("headway_kv_blocks_free") == ["headway", "kv", "blocks", "free"]
    assert parts("KVLedger") == ["kv", "ledger"]


def test_metric_names_and_flags_are_names_too() -> None:
    found = [name for _, name in names('GAUGES = {"headway_seats_free": 1, "--max-seats": 2}\n')]
    assert "headway_seats_free" in found
    assert "--max-seats" in found


@pytest.mark.parametrize("text", ["whoever waits", "it sits down", "the foretold time", "two seats", "nobody runs"])
def test_retired_phrases_are_found_with_their_line(text: str) -> None:
    assert [line for line, _ in prose(f"fine\n{text}\n")] == [2]


def test_plain_sentences_pass() -> None:
    assert list(prose("The scheduler admits requests while slots and blocks last.")) == []


def test_two_classes_of_one_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Model: ...\n")
    (tmp_path / "b.py").write_text("class Model: ...\nclass Other: ...\n")
    assert len(list(repeated_classes(tmp_path))) == 1
