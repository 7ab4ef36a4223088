"""Masks say what may come next, behind draft tokens too; what must come is known; a copy goes its own way."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from headway.errors import RequestError
from headway.grammar import source
from headway.grammar.compiler import GrammarCompiler
from headway.grammar.matcher import GrammarVocabulary, Matcher
from vocabularies import byte_level

VOCAB = byte_level().get_vocab_size() + 9  # models have more rows than their tokenizer has tokens
EOS = byte_level().token_to_id("<end>")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_level().save(str(path))
    return GrammarVocabulary(lambda: path, VOCAB, [EOS])


def ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


def allowed(matcher: Matcher, drafts: tuple[int, ...] = ()) -> list[set[int]]:
    """The tokens of each mask."""
    lines = np.frombuffer(matcher.masks(drafts), np.uint8).reshape(1 + len(drafts), -1)
    return [set(np.flatnonzero(np.unpackbits(line, bitorder="little")).tolist()) for line in lines]


def test_a_mask_has_every_token_that_may_come_next_and_no_other(vocabulary: GrammarVocabulary) -> None:
    matcher = vocabulary.compile(source.choice(["hello", "hey"]))
    tokens = {byte_level().id_to_token(index) for index in allowed(matcher)[0]}
    assert tokens == {"h", "he", "hell", "hello"}
    assert matcher.take(ids("hello"))
    assert allowed(matcher) == [{EOS}]


HELLO = {"type": "object", "properties": {"hello": {"type": "boolean"}}}
BOUNDED = 'start: before "{" after\nbefore[max_tokens=2]: /[^{]*/\nafter[max_tokens=9]: /.*/'  # it cannot be undone


@pytest.mark.parametrize(
    ("grammar", "text"), [(source.json_schema(HELLO), '{"hello": tr'), (source.lark(BOUNDED), 'ab{"hello')]
)
def test_masks_behind_drafts_are_those_after_taking_them(
    vocabulary: GrammarVocabulary, grammar: str, text: str
) -> None:
    matcher = vocabulary.compile(grammar)
    drafts = tuple(ids(text))
    found = allowed(matcher, drafts)
    for count, masks in enumerate(found):
        other = matcher.copy()
        assert other.take(drafts[:count])
        assert masks == allowed(other)[0], count
    assert allowed(matcher)[0] == found[0], "drafts leave no trace"


def test_behind_a_forbidden_draft_nothing_is_allowed_where_none_can_be_undone(vocabulary: GrammarVocabulary) -> None:
    matcher = vocabulary.compile(source.lark(BOUNDED))
    first, second, third, fourth, fifth = allowed(matcher, tuple(ids("abcd")))
    assert first
    assert second
    assert third == set(ids("{"))
    assert (fourth, fifth) == (set(), set())
    assert allowed(matcher) == [first]
    assert matcher.error == ""


def test_behind_a_forbidden_draft_nothing_is_allowed(vocabulary: GrammarVocabulary) -> None:
    matcher = vocabulary.compile(source.choice(["hello", "hey"]))
    first, second, third = allowed(matcher, (*ids("he"), *ids("w")))[:3]
    assert first
    assert second
    assert third == set()
    assert allowed(matcher) == [first]
    assert matcher.error == ""


def test_what_must_come_is_spelled_as_the_vocabulary_does(vocabulary: GrammarVocabulary) -> None:
    matcher = vocabulary.compile(source.choice(["hello world, hello"]))
    forced = matcher.forced(16)
    assert list(forced) == ids("hello world, hello")[: len(forced)]
    assert len(forced) > 3
    assert matcher.forced(2) == forced[:2]
    assert vocabulary.compile(source.choice(["a", "b"])).forced(16) == ()


def test_a_copy_goes_its_own_way(vocabulary: GrammarVocabulary) -> None:
    matcher = vocabulary.compile(source.choice(["ab", "cd"]))
    other = matcher.copy()
    assert matcher.take(ids("a"))
    assert other.take(ids("c"))
    assert allowed(matcher) == [set(ids("b"))]
    assert allowed(other) == [set(ids("d"))]


def test_a_wrong_token_is_an_error_that_stays(vocabulary: GrammarVocabulary) -> None:
    matcher = vocabulary.compile(source.choice(["ab"]))
    assert not matcher.take(ids("x"))
    assert "doesn't satisfy the grammar" in matcher.error
    assert not matcher.take(ids("a"))


@pytest.mark.parametrize("grammar", [source.regex("a("), source.lark("nothing"), "{}", "no json", source.lark("")])
def test_what_is_no_grammar_is_said_so(vocabulary: GrammarVocabulary, grammar: str) -> None:
    with pytest.raises(RequestError, match="this grammar cannot be used"):
        vocabulary.compile(grammar)


def test_a_grammar_whose_masks_take_long_is_given_up_after_a_few(vocabulary: GrammarVocabulary) -> None:
    """Ambiguous: the ways to read what was written grow with its length, and so does the time for the next mask."""
    first = vocabulary.compile(source.lark('start: x\nx: x x | "a" | x "a" x'))
    others = [first.copy() for _ in range(2)]
    token, num_taken = ids("a")[0], 0
    while not others[0].error:
        assert num_taken < 2000, "it was never given up"
        num_taken += 1
        for other in others:
            other.take([token])
            other.masks(())
    assert "takes more than 10 ms" in others[0].error
    assert allowed(others[0]) == [set()]
    assert allowed(vocabulary.compile(source.choice(["a"]))) == [{token}]


def test_the_compiler_answers_each_start_once_and_compiles_a_text_once(vocabulary: GrammarVocabulary) -> None:
    compiled: list[str] = []

    class Counting(GrammarVocabulary):
        def compile(self, grammar: str) -> Matcher:
            compiled.append(grammar)
            return vocabulary.compile(grammar)

    compiler = GrammarCompiler(Counting(Path, VOCAB, [EOS]))
    try:
        good, bad = source.choice(["a"]), source.regex("(")
        for id, grammar in enumerate((good, bad, good, bad, good)):
            compiler.start(id, grammar)
        got: dict[int, object] = {}
        while len(got) < 5:
            got |= dict(compiler.done())
        compiler.start(9, good)
        got |= dict(compiler.done())
        assert [isinstance(got[id], RequestError) for id in (0, 1, 2, 3, 4, 9)] == [
            False,
            True,
            False,
            True,
            False,
            False,
        ]
        assert len(set(got.values())) == 5, "each has a matcher of its own; an error is shared"
        assert sorted(compiled) == sorted([good, bad])
        assert compiler.done() == []
    finally:
        compiler.close()


def test_the_first_mask_is_a_part_of_compiling_and_not_of_every_answer(vocabulary: GrammarVocabulary) -> None:
    fields = {f"v{i}": {"type": "string", "pattern": f"(a|b)*c{{{i % 50 + 1}}}"} for i in range(4000)}
    compiled = vocabulary.compile(source.json_schema({"type": "object", "properties": fields}))
    taken = []
    for _ in range(5):
        copy, began = compiled.copy(), time.thread_time()
        copy.masks(())
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.002, "CPU seconds: it is kept with the grammar, and takes 20 ms or more to find"
