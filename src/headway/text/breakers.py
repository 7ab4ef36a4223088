"""Strings at which a repeat ends, as the tokens of a vocabulary whose text holds one of them.

The vocabulary is read once, which takes a tenth of a second for 100,000 tokens; after that a set of strings takes a few
milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from headway.text.tokenizer import Tokenizer

DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class BreakerTokens:
    """Threads may share it: at worst two of them read the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = b""  # of all tokens, one behind the other
        self._starts: list[int] = []

    def of(self, breakers: tuple[str, ...]) -> tuple[int, ...]:
        """The tokens that hold one of these strings, ascending."""
        if not self._starts:
            self._read()
        return tuple(sorted({index for breaker in breakers for index in self._holding(breaker.encode())}))

    def _read(self) -> None:
        texts = [self._tokenizer.token_bytes(index) for index in range(self._tokenizer.vocab_size)]
        starts, at = [], 0
        for text in texts:
            starts.append(at)
            at += len(text)
        self._text, self._starts = b"".join(texts), starts

    def _holding(self, breaker: bytes) -> Iterator[int]:
        """A find may reach from one token into the next: then it is none, and the next byte is looked at."""
        starts, at = self._starts, self._text.find(breaker)
        while at >= 0:
            index = bisect_right(starts, at) - 1
            end = starts[index + 1] if index + 1 < len(starts) else len(self._text)
            if at + len(breaker) <= end:
                yield index
                at = end - 1  # once is enough
            at = self._text.find(breaker, at + 1)
