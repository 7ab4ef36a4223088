"""Answers that are known beforehand: one token is allowed at each place, and it is proposed."""

from __future__ import annotations

import pytest

from headway.errors import RequestError
from headway.grammar.exactly import ExactMatcher, exactly, is_exact

VOCAB = 21


def bits(mask: bytes) -> set[int]:
    return {8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def test_masks_allow_one_token_at_each_place_and_any_behind_the_last() -> None:
    grammar = exactly([7, 20, 0])
    matcher = ExactMatcher.of(grammar, VOCAB)
    assert is_exact(grammar)
    masks = matcher.masks((7, 20, 0))
    assert [bits(masks[at : at + 3]) for at in (0, 3, 6)] == [{7}, {20}, {0}]
    assert len(masks) == 12
    assert len(bits(masks[9:])) == 24
    assert matcher.forced(2) == (7, 20)
    assert matcher.take((7,))
    other = matcher.copy()
    assert matcher.take((20, 0))
    assert (matcher.forced(4), other.forced(4)) == ((), (20, 0))
    assert matcher.error == ""


def test_a_wrong_token_is_an_error_that_stays() -> None:
    matcher = ExactMatcher.of(exactly([1, 2]), VOCAB)
    assert not matcher.take((2,))
    assert matcher.error
    assert not matcher.take((2,))


def test_tokens_are_of_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="21"):
        ExactMatcher.of(exactly([1, 21]), VOCAB)
