"""Calls are found in the text of an answer, and what comes piece by piece is what the whole text gives.

`HEADWAY_TEST_SPLITS=10000` tries as many splits of texts as the full check has.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from typing import Any

import pytest

from headway.text.call_format import BARE_JSON, TAGGED, CallFormat
from headway.text.tool_calls import CallReader

NUM_SPLITS = int(os.environ.get("HEADWAY_TEST_SPLITS", "1000"))
ARGUMENTS = ['{"city": "Paris"}', "{}", '{"a": {"b": [1, {"c": "}{"}]}, "d": "\\"}\\\\"}', '{"é": "😀<tool_call>"}']


def read(format: CallFormat, parts: list[str]) -> tuple[str, list[tuple[str, str]], bool]:
    """Text, calls as name and arguments, and whether the answer ends with a whole call."""
    reader, text = CallReader(format), ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        more, pieces = reader.push(part)
        text += more
        for piece in pieces:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = name, arguments + piece.arguments
    return text + reader.finish(), calls, reader.is_complete


def written(calls: list[tuple[str, str]]) -> str:
    return "\n".join(TAGGED.written(*call) for call in calls)


@pytest.mark.parametrize("before", ["", "Let me see.", "a < b <tool_cal", " \n x"])
def test_calls_and_what_stands_before_them(before: str) -> None:
    calls = [(f"f{at}", arguments) for at, arguments in enumerate(ARGUMENTS)]
    for blanks in ("", " \n\n") if before else ("",):
        assert read(TAGGED, [before + blanks + written(calls)]) == (before, calls, True)
    assert read(TAGGED, [before + " "]) == (before + " ", [], False)


def test_bare_json_is_a_call_at_the_beginning_alone() -> None:
    call = BARE_JSON.written("f", ARGUMENTS[2])
    assert read(BARE_JSON, [call]) == ("", [("f", ARGUMENTS[2])], True)
    for text in (f" {call}", f"so {call}", '{"name', '{"names": 1}', ""):
        assert read(BARE_JSON, [text]) == (text, [], False)


def test_an_answer_that_is_cut_off_has_the_beginning_of_its_call() -> None:
    expected = [("f", ARGUMENTS[0]), ("g", ARGUMENTS[2])]
    whole = f"So: {written(expected)}"
    for end in range(len(whole) + 1):
        text, calls, is_complete = read(TAGGED, [whole[:end]])
        assert text == ("So:" if TAGGED.opening in whole[:end] else whole[:end])
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, expected, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)
        assert is_complete == bool(calls and _is_json(calls[-1][1]))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def random_answer(rng: random.Random) -> tuple[CallFormat, str]:
    """Texts with calls, cut off and broken ones among them."""
    pieces = ["a", " ", "\n", "<", "<tool", "<tool_call", "{", '{"name": ', "é😀"]
    before = "".join(rng.choices(pieces, k=rng.randrange(6)))
    calls = [(rng.choice(["f", "a.b-c_d"]), rng.choice(ARGUMENTS)) for _ in range(rng.randrange(4))]
    format, text = TAGGED, before + written(calls)
    if calls and rng.random() < 0.3:
        format, text = BARE_JSON, rng.choice(["", before]) + BARE_JSON.written(*calls[0])
    if rng.random() < 0.3:
        text = text[: rng.randrange(len(text) + 1)]
    if rng.random() < 0.2:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["x", "}", '"', "\n", "<tool_call>"]) + text[at:]
    return format, text


def test_any_split_gives_what_the_whole_gives() -> None:
    rng = random.Random(20)
    for _ in range(NUM_SPLITS):
        format, text = random_answer(rng)
        edges = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))})
        parts = [text[a:b] for a, b in itertools.pairwise(edges)]
        if rng.random() < 0.2:
            parts = list(text)
        assert read(format, parts) == read(format, [text]), (format, text, parts)


def test_ids_follow_from_the_key_and_the_index() -> None:
    def ids(key: bytes) -> list[Any]:
        _, pieces = CallReader(TAGGED, key).push(written([("f", "{}"), ("f", "{}")]))
        return [piece.id for piece in pieces if piece.id is not None]

    assert ids(b"a") == ids(b"a")
    assert len({*ids(b"a"), *ids(b"b")}) == 4
    assert all(len(id) == 29 and id.startswith("call_") for id in ids(b"a"))
