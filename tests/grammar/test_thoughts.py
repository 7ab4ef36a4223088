"""Reasoning by a grammar: free until it is closed, no longer than allowed, and then the answer has its form."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from headway.grammar import source
from headway.grammar.calls import CallableFunction, CallChoice, calls
from headway.grammar.matcher import GrammarVocabulary
from headway.grammar.thoughts import behind_thoughts
from headway.text.call_format import TAGGED
from serve_harness import byte_vocabulary

EOS = 0
MARKS = {"<think>": 257, "</think>": 258, "<tool_call>": 259, "</tool_call>": 260}
YES = source.choice(["yes"])


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    path = tmp_path_factory.mktemp("marks") / "tokenizer.json"
    inner = byte_vocabulary()
    inner.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    inner.save(str(path))
    return GrammarVocabulary(lambda: path, 261, [EOS])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_vocabulary().save(str(path))
    return GrammarVocabulary(lambda: path, 257, [EOS])


def ids(text: str, marks: dict[str, int]) -> list[int]:
    for mark, index in marks.items():
        text = text.replace(mark, chr(0xE000 + index))
    chunks = [[ord(char) - 0xE000] if ord(char) >= 0xE000 else [b + 1 for b in char.encode()] for char in text]
    return [index for chunk in chunks for index in chunk]


def takes(vocabulary: GrammarVocabulary, grammar: str, text: str, marks: dict[str, int]) -> bool:
    return vocabulary.compile(grammar).take([*ids(text, marks), EOS])


@pytest.mark.parametrize("marks", [MARKS, {}], ids=["one token", "spelled"])
def test_the_answer_has_its_form_behind_reasoning(
    plain: GrammarVocabulary, with_marks: GrammarVocabulary, marks: dict[str, int]
) -> None:
    vocabulary = with_marks if marks else plain
    may, is_open = (behind_thoughts(YES, marks, is_open=each) for each in (False, True))
    for text in ["a < b\n</think>\n\nyes", "</think>yes"]:
        assert takes(vocabulary, is_open, text, marks)
        assert takes(vocabulary, may, f"<think>{text}", marks)
    assert takes(vocabulary, may, "yes", marks)
    for text in ["yes", "hm</think>no", "hm</think>", "hm"]:
        assert not takes(vocabulary, is_open, text, marks)
        assert not takes(vocabulary, may, f"<think>{text}", marks)


@pytest.mark.parametrize("most", [0, 1, 5])
def test_reasoning_has_no_more_tokens_than_allowed(with_marks: GrammarVocabulary, most: int) -> None:
    for answer, text in ((YES, "yes"), ("", "free text")):
        grammar = behind_thoughts(answer, MARKS, is_open=True, most=most)
        for size in range(most + 3):
            assert takes(with_marks, grammar, "x" * size + "</think>" + text, MARKS) is (size <= most)
        matcher = with_marks.compile(grammar)
        matcher.take(ids("x" * most, MARKS))
        assert matcher.forced(8)[:1] == (MARKS["</think>"],)


def test_calls_come_behind_reasoning_too(with_marks: GrammarVocabulary) -> None:
    choice = CallChoice((CallableFunction("f", {"type": "object"}),))
    inner = calls(choice, TAGGED, MARKS, source.json_object())
    grammar = behind_thoughts(inner, MARKS, is_open=False, most=3)
    call = TAGGED.written("f", "{}")
    for text, is_right in ((call, True), ('{"a": 1}', True), ("text", False)):
        assert takes(with_marks, grammar, text, MARKS) is is_right
        assert takes(with_marks, grammar, f"<think>abc</think>\n\n{text}", MARKS) is is_right
        assert not takes(with_marks, grammar, f"<think>abcd</think>{text}", MARKS)
