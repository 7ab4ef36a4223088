"""Pieces of a growing answer add up to the decoded whole, for every sequence and every way to cut it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.text.detok import Detokenizer
from headway.text.tokenizer import Tokenizer
from vocabularies import byte_level, sentencepiece, words


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer({"bytes": byte_level, "pieces": sentencepiece, "words": words}[kind]())


def pieces(kind: str, ids: list[int], cuts: list[int], skip_special: bool) -> list[str]:
    detok = Detokenizer(tokenizer(kind), skip_special)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    found = [detok.push(ids[start:end]) for start, end in pairwise(bounds)]
    return [*found, detok.flush()]


@settings(max_examples=600, deadline=None)
@given(
    kind=st.sampled_from(["bytes", "pieces"]),
    ids=st.lists(st.integers(0, 290), max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    skip_special=st.booleans(),
)
@example(kind="pieces", ids=[3 + 0xF0, 3 + 0x9F, 3 + 0x41], cuts=[1, 2], skip_special=True)
@example(kind="pieces", ids=[3 + 0x80, 9999, 3], cuts=[], skip_special=True)
@example(kind="pieces", ids=[259, 259], cuts=[0, 1], skip_special=True)
def test_any_ids_in_any_cut_add_up_to_the_decoded_whole(
    kind: str, ids: list[int], cuts: list[int], skip_special: bool
) -> None:
    assert "".join(pieces(kind, ids, cuts, skip_special)) == tokenizer(kind).decode(ids, skip_special)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(["bytes", "pieces"]), text=st.text(max_size=12), data=st.data())
def test_no_piece_of_a_text_ends_inside_a_character(kind: str, text: str, data: st.DataObject) -> None:
    ids = tokenizer(kind).encode(text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    found = pieces(kind, ids, [*cuts, *range(len(ids))], True)
    assert "".join(found) == tokenizer(kind).decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 3), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=8))
def test_decoders_that_depend_on_neighbours_add_up_as_well(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces("words", ids, cuts, True)) == tokenizer("words").decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_plain_text_is_not_held_back(kind: str) -> None:
    detok = Detokenizer(tokenizer(kind))
    ids = tokenizer(kind).encode("hello a", add_special=False)
    assert "".join(detok.push([index]) for index in ids) == "hello a"
    assert detok.flush() == ""


def test_an_unfinished_character_is_held_and_then_replaced() -> None:
    detok = Detokenizer(tokenizer("bytes"))
    first, *_ = tokenizer("bytes").encode("🙂")
    assert detok.push([first]) == ""
    assert detok.flush() == "\ufffd"
