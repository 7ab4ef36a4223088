"""What `scripts/soak` says about wrong answers and unequal sides; the run itself takes a server and a model."""

from __future__ import annotations

from headway.serve.openai import DefaultSampling
from soak import Ask, Outcome, Wrong, by_block, by_prompt, differences, draw_asks, request_of

ASKS = [Ask(prompt, seed, None, seed % 2 == 0) for prompt in ("aab", "aac", "z") for seed in (1, 2)]
WRONG = [Wrong(ASKS[0], "abx", "aby"), Wrong(ASKS[1], "ab", "abc"), Wrong(ASKS[2], "q", "r"), Wrong(ASKS[4], "1", "2")]


def _keys(prompt: str) -> list[bytes]:
    """A block of two characters."""
    return [prompt[:end].encode() for end in range(2, len(prompt) + 1, 2)]


def test_wrong_answers_are_grouped_by_prompt_with_where_they_differ() -> None:
    lines = by_prompt(WRONG, ASKS)
    assert [line for line in lines if not line.startswith(" ")] == [
        "2 of 2 answers to 'aab'",
        "1 of 2 answers to 'aac'",
        "1 of 2 answers to 'z'",
    ]
    assert lines[1:3] == ["  seed 1, whole, differs at character 2", "    got      'abx'"]
    assert lines[4] == "  seed 2, streamed, differs at character its end"


def test_wrong_answers_are_grouped_by_the_blocks_they_share() -> None:
    assert by_block(WRONG, ASKS, _keys) == ["block 0 with key 6161: 3 of 4 wrong", "1 wrong that share no full block"]


def test_sides_with_different_or_missing_facts_differ() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert differences({"a": "1", "b": "2"}, {"a": "9", "c": "3"}) == [
        "a: '1' here, '9' in the server",
        "b: '2' here, 'not reported' in the server",
        "c: 'not reported' here, '3' in the server",
    ]


def test_a_request_leaves_no_sampling_value_to_the_server() -> None:
    asked = request_of(ASKS[0], 1.0)
    given = {**asked, **asked["extra_body"]}
    assert {name for name in DefaultSampling.__struct_fields__ if name not in given} == set()


def test_equal_seeds_draw_equal_clients() -> None:
    assert draw_asks(3, 20, 0.3, ["a", "b"]) == draw_asks(3, 20, 0.3, ["a", "b"])
    assert draw_asks(3, 20, 0.3, ["a", "b"]) != draw_asks(4, 20, 0.3, ["a", "b"])


def test_a_run_is_good_only_if_all_of_it_is() -> None:
    good = Outcome("greedy", 0, num_asked=6, num_cut=1, code=0)
    assert good.is_good
    assert good.line() == "| greedy | 0 | 1 | 5 of 5 | 0 | 0 | nothing | 0 |"
    assert not Outcome("greedy", 0, code=1).is_good
    assert not Outcome("greedy", 0, left="3 blocks", code=0).is_good
    assert not Outcome("greedy", 0, wrong=WRONG, code=0).is_good
