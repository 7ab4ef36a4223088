"""Grammars are tried out in a process of their own: hostile ones cost that process, and no more than their time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headway.errors import Overloaded, RequestError
from headway.grammar import source
from headway.grammar.check import GrammarChecker
from headway.request_limits import LIMITS
from vocabularies import byte_level

EOS = byte_level().token_to_id("<end>")
OBJECT = source.json_object()


def checker_of(folder: Path, **options: float) -> GrammarChecker:
    byte_level().save(str(folder / "tokenizer.json"))
    return GrammarChecker(folder / "tokenizer.json", byte_level().get_vocab_size(), [EOS], **options)


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    made = checker_of(tmp_path_factory.mktemp("checker"))
    yield made
    made.close()


def test_a_grammar_that_can_be_used_is_given_back(checker: GrammarChecker) -> None:
    found = checker.check(OBJECT)
    assert (found.grammar.replace(" ", ""), found.warnings) == (OBJECT.replace(" ", ""), ())


def test_what_is_not_honoured_is_refused_or_left_out_and_named(checker: GrammarChecker) -> None:
    schema = {"type": "object", "if": {}, "then": {}}
    with pytest.raises(RequestError, match=r'honoured: Unimplemented keys: .*"if"') as told:
        checker.check(source.json_schema(schema), param="response_format")
    assert told.value.param == "response_format"
    lenient = source.json_schema(schema, is_lenient=True)
    found = checker.check(source.json_schema(schema), lenient=lenient)
    assert found.grammar == lenient
    assert '"if", "then"' in found.warnings[0]


def test_another_notation_becomes_larks(checker: GrammarChecker) -> None:
    found = checker.check(source.lark('root ::= "a" digits\ndigits ::= [0-9]+'))
    assert "::=" not in found.grammar
    assert "start:" in found.grammar


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "grammar",
    [
        source.json_schema(nested(120)),
        source.choice([f"{number:06d}" * 8 for number in range(4000)]),
        source.regex("(" + "|".join(f"{i}[a-z]{{1,{i % 50 + 1}}}" for i in range(8000)) + ")"),
        source.regex("((a{1,1000}){1,1000}){1,1000}"),
        source.regex("(x+x+)+y" * 50),
        source.lark('start: a\na: a a | a a a | "x"'),
        source.json_schema({"$ref": "#"}),
        source.json_schema({"type": "string", "pattern": "(a+)+$"}),
        source.json_schema({"type": "string", "minLength": 1_000_000_000}),
        source.json_schema({"enum": [f"value {i}" for i in range(10_000)]}),
    ],
    ids=[
        "deep",
        "choices",
        "alternatives",
        "repeats",
        "backtracking",
        "ambiguous",
        "itself",
        "pattern",
        "long",
        "enum",
    ],
)
def test_hostile_grammars_are_answered_in_time_and_the_next_one_is_too(checker: GrammarChecker, grammar: str) -> None:
    checker.check(OBJECT)
    began = time.monotonic()
    with suppress(RequestError):
        checker.check(grammar)
    assert time.monotonic() - began < 60  # of which its own bound is 2 s
    checker.check(source.choice([str(began)]))


def test_a_grammar_that_takes_too_long_is_refused_and_its_process_replaced(tmp_path: Path) -> None:
    schema = {
        "anyOf": [{"properties": {f"p{j}": {"pattern": f"^a{{{i},{i + j}}}$"} for j in range(12)}} for i in range(400)]
    }
    checker = checker_of(tmp_path, check_s=0.1)
    try:
        checker.check(source.choice(["a"]))
        (child,) = checker._children.idle
        refusal = ""
        while not refusal:
            try:
                checker.check(source.json_schema(schema))
                raise AssertionError("it was compiled in time")
            except Overloaded:  # the machine is busy: its process was not heard of
                continue
            except RequestError as error:
                refusal = str(error)
        assert "takes longer than 0.1 s" in refusal
        assert not child.is_alive
        assert not checker._children.idle
    finally:
        checker.close()


def test_a_process_that_was_killed_is_replaced_and_verdicts_are_remembered(checker: GrammarChecker) -> None:
    checker.check(source.choice(["kept"]))
    (child,) = checker._children.idle
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()
    checker.check(source.choice(["kept"]))
    assert checker._children.idle == [child], "it was not asked"
    checker.check(source.choice(["new"]))
    assert checker._children.idle != [child]


def test_a_text_beyond_the_limit_is_not_even_sent(checker: GrammarChecker) -> None:
    with pytest.raises(RequestError, match=f"up to {LIMITS.grammar_chars}"):
        checker.check("x" * (LIMITS.grammar_chars + 1))


def test_a_model_without_an_end_token_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        GrammarChecker(tmp_path / "none.json", 10, []).check(OBJECT)


def test_a_grammar_that_would_fill_the_engines_memory_is_refused(tmp_path: Path) -> None:
    checker = checker_of(tmp_path, check_s=120.0)
    try:
        checker.check(source.json_schema({"type": "integer", "multipleOf": 20_000}))
        for number in (200_003, 200_017):  # a second one finds the memory of the first one free
            with pytest.raises(RequestError, match=r"it takes \d+ MiB when compiled; allowed: up to 16"):
                checker.check(source.json_schema({"type": "integer", "multipleOf": number}))
    finally:
        checker.close()
