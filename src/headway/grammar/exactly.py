"""Answers that are known beforehand, token by token: a matcher of them, for the log probabilities of a given text.

It needs no library. All of the answer is proposed as draft tokens, so that a step computes many of its positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headway.errors import RequestError

_FIXED = '{"tokens":'


def exactly(tokens: Sequence[int]) -> str:
    """These tokens and no others, as a grammar for `SamplingParams`; among them may be what ends answers."""
    return json.dumps({"tokens": list(tokens)}, separators=(",", ":"))


def is_exact(grammar: str) -> bool:
    """Whether a grammar is what `exactly` gives."""
    return grammar.startswith(_FIXED)


class ExactMatcher:
    """Where an answer is within its tokens; behind them any token may come, as nothing is asked of it there."""

    def __init__(self, tokens: tuple[int, ...], vocab_size: int, at: int = 0) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._at = at
        self.error = ""

    @staticmethod
    def of(grammar: str, vocab_size: int) -> ExactMatcher:
        """RequestError if it is not one of tokens of this vocabulary."""
        tokens = json.loads(grammar)["tokens"]
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"grammar has token id {wrong}; allowed: 0 to {vocab_size - 1}", param="grammar")
        return ExactMatcher(tuple(tokens), vocab_size)

    def copy(self) -> ExactMatcher:
        """The same place, for another answer."""
        return ExactMatcher(self._tokens, self._vocab_size, self._at)

    def take(self, tokens: Sequence[int]) -> bool:
        """The answer goes on with these; False, and an `error`, if others are to come."""
        expected = self._tokens[self._at : self._at + len(tokens)]
        self._at += len(tokens)
        if tuple(tokens)[: len(expected)] != expected:
            self.error = "the answer is not of the tokens that it was to have"
        return not self.error

    def masks(self, drafts: Sequence[int]) -> bytes:
        """A mask for the next token and for the one behind each draft token, end to end."""
        size = -(-self._vocab_size // 8)
        bits = bytearray(size * (1 + len(drafts)))
        for ahead in range(1 + len(drafts)):
            at = self._at + ahead
            if at >= len(self._tokens):
                bits[size * ahead : size * (ahead + 1)] = b"\xff" * size
            else:
                bits[size * ahead + self._tokens[at] // 8] |= 1 << self._tokens[at] % 8
        return bytes(bits)

    def forced(self, most: int) -> tuple[int, ...]:
        """The next tokens."""
        return self._tokens[self._at : self._at + max(0, most)]
