"""Which replicas hold which blocks: exact, since every replica tells each block that it publishes and drops.

A key covers the whole prefix before it, so the replicas that hold the n-th block of a prompt usefully are those that
hold all before it too. Keys are cut to 16 bytes. It knows numbers of replicas and nothing else of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.engine.messages import KEY_BYTES


class HolderIndex:
    """A key maps to a set of replicas, as bits; a key that none holds is not in it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def change(self, replica: int, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """A replica has blocks more and blocks less."""
        holders, bit = self._holders, 1 << replica
        for key in added:
            holders[key] = holders.get(key, 0) | bit
        for key in removed:
            self._clear(key, bit)

    def drop(self, replica: int) -> None:
        """A replica holds nothing any more."""
        bit = 1 << replica
        for key in [key for key, found in self._holders.items() if found & bit]:
            self._clear(key, bit)

    def num_held(self, keys: Sequence[bytes], num_replicas: int) -> list[int]:
        """By replica: how many leading blocks of this chain it holds."""
        counts, left = [0] * num_replicas, (1 << num_replicas) - 1
        for at, key in enumerate(keys):
            still = left & self._holders.get(key[:KEY_BYTES], 0)
            gone, left = left & ~still, still
            while gone:
                low = gone & -gone
                counts[low.bit_length() - 1] = at
                gone ^= low
            if not left:
                return counts
        while left:
            low = left & -left
            counts[low.bit_length() - 1] = len(keys)
            left ^= low
        return counts

    def num_blocks(self, num_replicas: int) -> list[int]:
        """By replica: how many blocks it holds."""
        return [sum(found >> number & 1 for found in self._holders.values()) for number in range(num_replicas)]

    def _clear(self, key: bytes, bit: int) -> None:
        found = self._holders.get(key, 0) & ~bit
        if found:
            self._holders[key] = found
        else:
            self._holders.pop(key, None)
