"""Guesses by what followed the same tokens before: the longest suffix counts, the newest occurrence, one namespace."""

from __future__ import annotations

import random

import pytest

from headway.spec.suffix import (
    LONGEST,
    MOST_PASTS,
    NO_MATCH,
    OWN_ORDERS,
    PAST_ORDERS,
    PAST_TOKENS,
    Match,
    PastOutputs,
    SuffixIndex,
)


def indexed(*tokens: int) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(tokens)
    return index


def test_what_followed_the_longest_known_suffix_is_the_guess() -> None:
    index = indexed(9, 1, 2, 3, 4, 70, 71, 5, 3, 4, 80, 81, 1, 2, 3, 4)
    assert index.find([1, 2, 3, 4], 2) == Match(4, (70, 71))
    assert index.find([5, 3, 4], 2) == Match(3, (80, 81)), "two tokens are looked up, the third is compared"
    assert index.find([6, 6, 4], 1) == Match(1, (80,)), "the newest occurrence that has a successor"


def test_of_equal_suffixes_the_newest_counts() -> None:
    assert indexed(1, 2, 7, 1, 2, 8, 1, 2).find([1, 2], 1).guess == (8,)


def test_a_loop_is_guessed_to_go_on() -> None:
    index = indexed(5, 1, 2, 3, 1, 2, 3)
    assert index.find([5, 1, 2, 3, 1, 2, 3][-LONGEST:], 8).guess == (1, 2, 3, 1, 2, 3, 1, 2)


def test_nothing_known_gives_no_guess() -> None:
    assert SuffixIndex().find([1, 2, 3], 4) == NO_MATCH
    assert indexed(1, 2, 3).find([4], 4) == NO_MATCH
    assert indexed(1, 2, 3).find([], 4) == NO_MATCH
    assert indexed(1, 2, 1).find([1], 0) == NO_MATCH, "no room for a guess"
    assert indexed(1, 2, 3).find([3], 4) == NO_MATCH, "the last token has no successor yet"


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_come_one_by_one_give_the_guesses_of_all_at_once(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(80)]
    grown = SuffixIndex()
    for end in range(1, len(tokens) + 1):
        grown.extend(tokens[end - 1 : end])
        context = tokens[max(0, end - LONGEST) : end]
        assert grown.find(context, 5) == indexed(*tokens[:end]).find(context, 5) == slow(tokens[:end], 5)


def slow(tokens: list[int], most: int) -> Match:
    """The same by trying every place."""
    end = len(tokens)
    for order in OWN_ORDERS:
        places = [at for at in range(order, end) if order <= end and tokens[at - order : at] == tokens[end - order :]]
        if places:
            at, length = places[-1], order
            while length < min(LONGEST, at, end) and tokens[at - length - 1] == tokens[end - length - 1]:
                length += 1
            guess = tokens[at:]
            return Match(length, tuple((guess * most)[:most]))
    return NO_MATCH


def test_past_outputs_stay_in_their_namespace() -> None:
    past = PastOutputs()
    past.add(b"ann", [1, 2, 3, 4, 5])
    assert past.find(b"ann", [1, 2], 2) == Match(2, (3, 4))
    assert past.find(b"bob", [1, 2], 2) == NO_MATCH
    assert past.find(b"ann", [2], 2) == NO_MATCH, "one token says little of other requests' outputs"


def test_the_older_half_of_past_outputs_is_forgotten() -> None:
    past = PastOutputs()
    past.add(b"", [1, 2, 3])
    past.add(b"", [9] * PAST_TOKENS)
    past.add(b"", [4, 5, 6])
    assert past.find(b"", [1, 2], 1).guess == (3,)
    assert past.find(b"", [4, 5], 1).guess == (6,)
    past.add(b"", [9] * PAST_TOKENS)
    past.add(b"", [7, 8])
    assert past.find(b"", [1, 2], 1) == NO_MATCH
    assert past.find(b"", [4, 5], 1).guess == (6,)


def test_namespaces_not_used_for_longest_are_forgotten() -> None:
    past = PastOutputs()
    past.add(b"first", [1, 2, 3])
    past.add(b"second", [1, 2, 3])
    for number in range(MOST_PASTS - 2):
        past.add(bytes([number]), [5, 6, 7])
    past.add(b"first", [4, 5, 6])
    past.add(b"one more", [5, 6, 7])
    assert past.find(b"first", [1, 2], 1).guess == (3,)
    assert past.find(b"second", [1, 2], 1) == NO_MATCH
    assert min(PAST_ORDERS) > 1
