"""Reasoning is told from the answer, and what comes piece by piece is what the whole text gives.

`HEADWAY_TEST_SPLITS=10000` tries as many splits of texts as the full check has.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest

from headway.text.answer_parts import AnswerParts
from headway.text.call_format import BARE_JSON, TAGGED
from headway.text.thoughts import Thinking, ThoughtReader

NUM_SPLITS = int(os.environ.get("HEADWAY_TEST_SPLITS", "1000"))


def read(thinking: Thinking, parts: list[str]) -> tuple[str, str]:
    """Reasoning and answer."""
    reader = ThoughtReader(thinking)
    found = [*(reader.push(part) for part in parts), reader.finish()]
    return "".join(thoughts for thoughts, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (Thinking.MAY, "<think>\nHm, so.\n</think>\n\nYes. ", ("Hm, so.", "Yes. ")),
        (Thinking.MAY, " \n<think>a</think>b", ("a", "b")),
        (Thinking.MAY, "<think></think>b", ("", "b")),
        (Thinking.MAY, " Yes <think>a</think>", ("", " Yes <think>a</think>")),
        (Thinking.MAY, "<thin", ("", "<thin")),
        (Thinking.MAY, "<think>a < b </thin", ("a < b </thin", "")),
        (Thinking.MAY, "<think>a \n", ("a", "")),
        (Thinking.OPEN, "\nHm.\n\n</think>\n\nYes", ("Hm.", "Yes")),
        (Thinking.OPEN, "a</think>b</think>c", ("a", "b</think>c")),
        (Thinking.OPEN, "no end", ("no end", "")),
        (Thinking.OPEN, "</think>x", ("", "x")),
        (Thinking.NEVER, "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_reasoning_and_answer(thinking: Thinking, text: str, expected: tuple[str, str]) -> None:
    assert read(thinking, [text]) == expected
    assert read(thinking, list(text)) == expected


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("{{ x }}", "<think>", Thinking.NEVER),
        ("<think>", "user: a\nassistant: <think>\n", Thinking.OPEN),
        ("</think>", "assistant: ", Thinking.MAY),
        ("<think>", "assistant: <think>\n\n</think>\n\n", Thinking.NEVER),
    ],
)
def test_the_template_and_its_prompt_say_whether_there_is_reasoning(
    template: str, prompt: str, expected: Thinking
) -> None:
    assert Thinking.of(template, prompt) is expected


def test_a_continued_message_is_within_reasoning_or_behind_it() -> None:
    assert Thinking.within("<think>so") is Thinking.OPEN
    assert Thinking.within("<think>so</think>") is Thinking.NEVER
    assert Thinking.within("so") is Thinking.NEVER


def test_any_split_gives_what_the_whole_gives() -> None:
    rng = random.Random(21)
    pieces = [" ", "\n", "a", "<", "<think>", "</think>", "</th", "é😀", TAGGED.written("f", '{"a": "</think>"}')]
    for _ in range(NUM_SPLITS):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        kinds = rng.choice([TAGGED, TAGGED, BARE_JSON, None]), rng.choice(list(Thinking))
        parts = AnswerParts(*kinds, {})
        edges = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))})
        split = [text[a:b] for a, b in itertools.pairwise(edges)] if rng.random() < 0.8 else list(text)

        def whole(pushed: list[str], parts: AnswerParts = parts) -> tuple[str, str, str, bool]:
            reader = parts.reader()
            found = [*(reader.push(each) for each in pushed), reader.finish()]
            calls = "".join(f"{piece.name or ''}{piece.arguments}" for each in found for piece in each.calls)
            texts = "".join(each.text for each in found), "".join(each.reasoning for each in found)
            return *texts, calls, reader.ends_with_calls

        assert whole(split) == whole([text]), (kinds, text, split)
