"""Grammars as text allow exactly what was asked for, whatever characters it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.errors import RequestError
from headway.grammar import source
from headway.grammar.matcher import GrammarVocabulary
from serve_harness import byte_vocabulary

EOS = 0


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_vocabulary().save(str(path))
    return GrammarVocabulary(lambda: path, 257, [EOS])


def takes(vocabulary: GrammarVocabulary, grammar: str, text: str) -> bool:
    """Whether a text is a whole answer by the grammar; a token is 1 and its byte."""
    return vocabulary.compile(grammar).take([*(byte + 1 for byte in text.encode()), EOS])


@pytest.mark.parametrize(
    "text", ["yes", "no/none", 'a "quoted"\\ word', "new\nline", "é… 😀", "\x7f \x01", "%", "| or", "/x/"]
)
def test_a_choice_is_one_of_the_texts_to_the_letter(vocabulary: GrammarVocabulary, text: str) -> None:
    grammar = source.choice(["other", text])
    assert takes(vocabulary, grammar, text)
    assert takes(vocabulary, grammar, "other")
    assert not takes(vocabulary, grammar, text[:-1])
    assert not takes(vocabulary, grammar, text + "x")


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("[a-c]+/[0-9]{2}", "abc/42", "abc/4"),
        (r"a\/b", "a/b", "ab"),
        ("^ab?$", "a", "abb"),
        (r"costs \$", "costs $", "costs "),
        ("x\ny", "x\ny", "xy"),
        (r"\\", "\\", "x"),
        ("(yes|no)!", "no!", "no"),
        ("[é-ü]+", "éü", "ea"),
    ],
)
def test_a_regular_expression_matches_the_whole_answer(
    vocabulary: GrammarVocabulary, pattern: str, right: str, wrong: str
) -> None:
    assert takes(vocabulary, source.regex(pattern), right)
    assert not takes(vocabulary, source.regex(pattern), wrong)


def test_json_by_a_schema_has_bounded_white_space_between_its_parts(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = source.json_schema({**schema, "additionalProperties": False})
    assert takes(vocabulary, grammar, '{"n":-3}')
    assert takes(vocabulary, grammar, '{\n  "n": 5\n}')
    assert not takes(vocabulary, grammar, '{"n":' + " " * 17 + "5}")
    assert not takes(vocabulary, grammar, '{"n":1.5}')
    assert not takes(vocabulary, grammar, '{"m":1}')


def test_any_object_is_one_and_nothing_else(vocabulary: GrammarVocabulary) -> None:
    for text in ("{}", '{"a": [1, {"b": null}], "c": "é\\n"}'):
        json.loads(text)
        assert takes(vocabulary, source.json_object(), text)
    for text in ("[]", "1", '{"a"}', "{", "{} {}"):
        assert not takes(vocabulary, source.json_object(), text)


def test_options_in_a_schema_of_a_client_are_not_ours(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "array", "items": {}, "x-guidance": {"whitespace_pattern": "x*", "lenient": True}, "if": {}}
    with pytest.raises(RequestError, match="Unimplemented"):
        vocabulary.compile(source.json_schema(schema))
    assert takes(vocabulary, source.json_schema(schema, is_lenient=True), "[1, 2]")
    assert not takes(vocabulary, source.json_schema(schema, is_lenient=True), "[1xxx,2]")


def test_a_schema_that_nests_without_end_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nests too deeply"):
        source.json_schema(schema)


def test_a_context_free_grammar(vocabulary: GrammarVocabulary) -> None:
    grammar = source.lark('start: "(" start ")" | "x"')
    assert takes(vocabulary, grammar, "((x))")
    assert not takes(vocabulary, grammar, "((x)")


def test_a_model_whose_answers_have_no_end_takes_no_grammar(tmp_path: Path) -> None:
    byte_vocabulary().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        GrammarVocabulary(lambda: tmp_path / "tokenizer.json", 257, []).compile(source.json_object())
