"""Calls by a grammar: text until one is opened, then nothing but calls, whatever tokens the vocabulary has."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from headway.errors import RequestError
from headway.grammar import source
from headway.grammar.calls import CallableFunction, CallChoice, calls
from headway.grammar.matcher import GrammarVocabulary
from headway.text.call_format import BARE_JSON, TAGGED, CallFormat
from serve_harness import byte_vocabulary

EOS = 0
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, CLOCK = CallableFunction("weather", CITY), CallableFunction("clock", {"type": "object", "maxProperties": 0})
IN_PARIS = TAGGED.written("weather", '{"city": "Paris"}')
TIME = TAGGED.written("clock", "{}")
MARKS = {"<tool_call>": 257, "</tool_call>": 258}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_vocabulary().save(str(path))
    return GrammarVocabulary(lambda: path, 257, [EOS])


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    """A vocabulary in which one token opens a call, and another one closes it."""
    path = tmp_path_factory.mktemp("marks") / "tokenizer.json"
    inner = byte_vocabulary()
    inner.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    inner.save(str(path))
    return GrammarVocabulary(lambda: path, 259, [EOS])


def ids(text: str, marks: dict[str, int]) -> list[int]:
    for mark, index in marks.items():
        text = text.replace(mark, chr(0xE000 + index))
    pieces = [ord(char) - 0xE000 if ord(char) >= 0xE000 else char for char in text]
    return [at for piece in pieces for at in ([piece] if isinstance(piece, int) else [b + 1 for b in piece.encode()])]


def takes(
    vocabulary: GrammarVocabulary,
    choice: CallChoice,
    text: str,
    format: CallFormat = TAGGED,
    marks: dict[str, int] = {},  # noqa: B006
    form: str = "",
) -> bool:
    return vocabulary.compile(calls(choice, format, marks, form)).take([*ids(text, marks), EOS])


RIGHT = [IN_PARIS, f"{IN_PARIS}\n{TIME}", TIME]
WRONG = [
    "<tool_call>",
    f"{IN_PARIS} and",
    f"{IN_PARIS}{TIME}",
    TAGGED.written("wether", "{}"),
    TAGGED.written("weather", '{"town": "Paris"}'),
    TAGGED.written("clock", "[]"),
    IN_PARIS.replace("\n", "", 1),
]


@pytest.mark.parametrize("marks", [{}, MARKS], ids=["spelled", "one token"])
def test_free_text_may_come_before_calls_and_nothing_behind_them(
    plain: GrammarVocabulary, with_marks: GrammarVocabulary, marks: dict[str, int]
) -> None:
    vocabulary, choice = with_marks if marks else plain, CallChoice((WEATHER, CLOCK))
    for text in ["", "Hello.\n", "a <tool_cal> b <", *RIGHT, *(f"Let me see:\n\n{right}" for right in RIGHT)]:
        assert takes(vocabulary, choice, text, marks=marks), text
    for text in [*WRONG, *(f"Let me see: {wrong}" for wrong in WRONG)]:
        assert not takes(vocabulary, choice, text, marks=marks), text


def test_text_never_spells_what_one_token_opens(with_marks: GrammarVocabulary) -> None:
    matcher = with_marks.compile(calls(CallChoice((WEATHER,)), TAGGED, MARKS))
    assert not matcher.take(ids("so <tool_call>", {}))


@pytest.mark.parametrize("marks", [{}, MARKS], ids=["spelled", "one token"])
def test_required_calls_come_at_once(
    plain: GrammarVocabulary, with_marks: GrammarVocabulary, marks: dict[str, int]
) -> None:
    vocabulary, choice = with_marks if marks else plain, CallChoice((WEATHER, CLOCK), is_required=True)
    for text in RIGHT:
        assert takes(vocabulary, choice, text, marks=marks), text
    for text in ["", "Hello", f" {IN_PARIS}", *WRONG]:
        assert not takes(vocabulary, choice, text, marks=marks), text


def test_there_are_no_more_calls_than_allowed(plain: GrammarVocabulary) -> None:
    for most in (1, 2, 5):
        for is_required in (False, True):
            choice = CallChoice((CLOCK,), is_required, most)
            assert takes(plain, choice, "\n".join([TIME] * most))
            assert not takes(plain, choice, "\n".join([TIME] * (most + 1)))


def test_bare_json_is_a_call_at_the_beginning_alone_and_only_one(plain: GrammarVocabulary) -> None:
    call, choice = BARE_JSON.written("weather", '{"city": "Paris"}'), CallChoice((WEATHER, CLOCK))
    for text in ["", "Hello", call, f"So: {call}!", '{"name', '{"nam": 1}']:
        assert takes(plain, choice, text, BARE_JSON), text
    for text in ['{"name": "x"}', f"{call}; {call}", f"{call} so", BARE_JSON.written("clock", '{"a": 1}')]:
        assert not takes(plain, choice, text, BARE_JSON), text


def test_an_answer_is_of_its_form_or_has_calls(plain: GrammarVocabulary) -> None:
    for form, right in ((source.json_schema(CITY), '{"city": "Rome"}'), (source.choice(["yes", "no"]), "no")):
        for text, is_right in ((right, True), (IN_PARIS, True), ("text", False), (f"so {IN_PARIS}", False)):
            assert takes(plain, CallChoice((WEATHER,)), text, form=form) is is_right


def test_strict_functions_stay_strict_where_others_are_lenient(plain: GrammarVocabulary) -> None:
    odd = {"type": "object", "if": {}, "then": {}}
    loose, strict = CallableFunction("a", odd), CallableFunction("b", odd, is_strict=True)
    with pytest.raises(RequestError, match="if"):
        plain.compile(calls(CallChoice((loose,)), TAGGED, {}))
    plain.compile(calls(CallChoice((loose,)), TAGGED, {}, is_lenient=True))
    with pytest.raises(RequestError, match="if"):
        plain.compile(calls(CallChoice((loose, strict)), TAGGED, {}, is_lenient=True))
