"""Stop strings cut the text at one place, however it arrives."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.text.stop import StopMatcher


def run(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    emitted = [matcher.push(part) for part in parts]
    emitted.append(matcher.flush())
    matched = [emit.matched for emit in emitted]
    assert matched == sorted(matched)  # once matched, always matched
    return "".join(emit.text for emit in emitted), matched[-1]


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.text("ab\n", max_size=4), max_size=10),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(parts=["a", "b", "b"], stops=["abc", "b"])
@example(parts=["a", "a", "b"], stops=["aab", "ab"])
def test_every_cut_of_a_text_gives_what_find_gives(parts: list[str], stops: list[str]) -> None:
    assert run(stops, parts) == cut("".join(parts), stops)


def test_only_text_that_may_be_a_stop_is_held() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("The answer is 4\nUs") == ("The answer is 4", False)
    assert matcher.push("ing it") == ("\nUsing it", False)
    assert matcher.push("\nUser: hi") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ("", True)


def test_an_earlier_stop_still_open_goes_first() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("xab") == ("x", False)
    assert matcher.push("c") == ("", True)
    matcher = StopMatcher(["abc", "b"])
    matcher.push("xab")
    assert matcher.push("d") == ("a", True)
    matcher = StopMatcher(["abc", "b"])
    matcher.push("xab")
    assert matcher.flush() == ("a", True)


def test_no_stops_hold_nothing() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)


def test_an_empty_stop_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopMatcher([""])
