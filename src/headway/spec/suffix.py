"""What may come next, by what followed the same tokens earlier: in the request itself, or in past outputs.

    tokens     … the cat sat on the mat . the cat ▏       the longest known suffix of up to 4 tokens counts, and of its
                         ╰── guess ──╯                     occurrences the newest; what followed it then is the guess

An index takes each token once and finds a suffix by a few hashes, however much it has taken. It knows no request and no
tenant: its owner decides whose tokens it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 16  # tokens up to which the length of a match is told
OWN_ORDERS = (4, 2, 1)  # lengths of the suffixes in the tables, the longest first
PAST_ORDERS = (4, 2)  # one token says little of what other requests go on with
PAST_TOKENS = 4096  # of each of two halves
MOST_PASTS = 32


class Match(NamedTuple):
    """The last `length` tokens were seen before; `guess` is what followed them then."""

    length: int
    guess: tuple[int, ...]


NO_MATCH = Match(0, ())


class SuffixIndex:
    """Every suffix of these lengths that has a successor in `tokens` is in the table of its length."""

    def __init__(self, orders: tuple[int, ...] = OWN_ORDERS) -> None:
        self.tokens: list[int] = []
        self._tables: list[tuple[int, dict[tuple[int, ...], int]]] = [(order, {}) for order in orders]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take more tokens; costs as much as they are."""
        known = self.tokens
        first = len(known)
        known += tokens
        end = len(known)
        for order, after in self._tables:
            begin = max(first, order)
            if begin < end:
                suffixes = zip(*(known[begin - order + i : end - order + i] for i in range(order)), strict=True)
                after.update(zip(suffixes, range(begin, end), strict=True))

    def find(self, context: Sequence[int], most: int) -> Match:
        """What followed the longest known suffix of `context`; at its end it goes on as it did since."""
        size, tokens = len(context), self.tokens
        for order, after in self._tables:
            at = after.get(tuple(context[-order:]), 0) if order <= size else 0
            if at and most > 0:
                length, limit = order, min(size, at, LONGEST)
                while length < limit and tokens[at - length - 1] == context[-length - 1]:
                    length += 1
                guess = tokens[at : at + most]
                return Match(length, tuple(guess * (-(-most // len(guess))))[:most])
        return NO_MATCH


class PastOutputs:
    """Outputs of ended requests, by the namespace of their cached prefixes; nothing passes from one to another.

    Each has two halves: when the newer is full the older is forgotten. Namespaces not used for longest go first.
    """

    def __init__(self) -> None:
        self._halves: dict[bytes, tuple[SuffixIndex, SuffixIndex]] = {}

    def add(self, namespace: bytes, output: Sequence[int]) -> None:
        fresh = SuffixIndex(PAST_ORDERS), SuffixIndex(PAST_ORDERS)
        newer, older = self._halves.pop(namespace, fresh)
        if len(newer.tokens) >= PAST_TOKENS:
            newer, older = SuffixIndex(PAST_ORDERS), newer
        newer.extend(output[-PAST_TOKENS:])
        self._halves[namespace] = newer, older
        if len(self._halves) > MOST_PASTS:
            del self._halves[next(iter(self._halves))]

    def find(self, namespace: bytes, context: Sequence[int], most: int) -> Match:
        """The longer match of the two halves, the newer one's if they are equal."""
        found = NO_MATCH
        for half in self._halves.get(namespace, ()):
            match = half.find(context, most)
            if match.length > found.length:
                found = match
        return found
