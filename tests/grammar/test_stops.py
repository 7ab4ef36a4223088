"""A text ends where a regular expression first matches, however it comes, and no expression takes long."""

from __future__ import annotations

import random
import re
import time
from contextlib import suppress

import pytest

from headway.errors import RequestError
from headway.grammar.stops import RegexStop


def cut(patterns: list[str], parts: list[str]) -> tuple[str, bool]:
    stop, text = RegexStop.of(patterns), ""
    for part in parts:
        more, has_ended = stop.push(part)
        text += more
        if has_ended:
            return text, True
    return text, False


def expected(pattern: str, text: str) -> tuple[str, bool]:
    """By the library of Python: the shortest beginning of the text that ends with a match."""
    for end in range(1, len(text) + 1):
        if re.search(f"(?:{pattern})\\Z", text[:end]):
            return text[:end], True
    return text, False


@pytest.mark.parametrize(
    "pattern", ["ab+c", r"\n\n", "[0-9]{3}", "é+!", "a.b", "x|yz", r"\d+ (one|two)/", "[^a]c", "😀"]
)
def test_the_end_of_the_first_match_ends_the_text(pattern: str) -> None:
    rng = random.Random(pattern)
    pieces = ["a", "b", "c", "\n", "1", "23 ", "é", "!", "x", "y", "z", "one/", "😀"]
    for _ in range(60):
        text = "".join(rng.choices(pieces, k=rng.randrange(25)))
        edge = rng.randrange(len(text) + 1)
        for parts in ([text], list(text), [text[:edge], text[edge:]]):
            assert cut([pattern], parts) == expected(pattern, text), text


def test_the_first_of_several_patterns_ends_it() -> None:
    assert cut(["c", "ab"], ["xxabc"]) == ("xxab", True)
    assert cut(["abc", "b"], ["xxabc"]) == ("xxab", True)


@pytest.mark.parametrize("pattern", ["a*", "", "a|", "(", "^a", r"\bword", "(?=a)b", r"(a)\1"])
def test_what_cannot_be_followed_or_matches_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        RegexStop.of([pattern])
    assert caught.value.param == "stop_regex"


@pytest.mark.parametrize(
    "pattern", ["(a?){40}a{40}b", "(a|aa)+b", "((a{1000}){1000}){1000}b", "(.*a.{900}b|.*c.{800}d|.*e.{700}f)*x"]
)
def test_hostile_patterns_take_no_long_time(pattern: str) -> None:
    stop, longest = RegexStop.of([pattern]), 0.0
    with suppress(RequestError):  # too complex
        for at in range(3000):
            began = time.thread_time()
            stop.push("acebdf"[at % 6])
            longest = max(longest, time.thread_time() - began)
    assert longest < 0.05


def test_a_pattern_that_becomes_too_complex_ends_the_text_with_an_error() -> None:
    stop = RegexStop.of(["(.*a.{900}b|.*c.{800}d|.*e.{700}f)*x"])
    with pytest.raises(RequestError, match="simplify") as caught:
        stop.push("acebdf" * 500)
    assert caught.value.code == "grammar_too_complex"


def test_a_copy_goes_its_own_way() -> None:
    stop = RegexStop.of(["ab"])
    stop.push("a")
    other = stop.copy()
    assert stop.push("b") == ("b", True)
    assert other.push("cab") == ("cab", True)
    assert not RegexStop.of(["ab"]).push("b").matched
