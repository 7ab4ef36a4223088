"""Chain keys and the index from a key to the block that holds exactly that prefix.

    tokens   [ 0 … 15 ][ 16 … 31 ][ 32 … 4
    keys       k0 ───────▶ k1         (no key: not full)
    k0 = sha256(seed, block 0)   k1 = sha256(k0, block 1)

The seed is opaque: a digest of the model, the KV layout, and the tenant or salt. Two requests share a block
only if seed and whole prefix are equal. The caller of `add` makes the prompt's keys; those of the output are made in
the step that frees the request, about 1 us per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

_ITEM = "i" if array("i").itemsize == 4 else "l"


def chain_seed(*parts: str | bytes) -> bytes:
    """A seed for `chain_keys` from whatever must not share blocks: model, layout, salt, adapter, namespace."""
    digest = sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def chain_keys(tokens: Sequence[int], block_size: int, seed: bytes) -> list[bytes]:
    """One key per full block; each covers every token before it."""
    return extend_keys([], tokens, block_size, seed)


def extend_keys(keys: Sequence[bytes], tokens: Sequence[int], block_size: int, seed: bytes) -> list[bytes]:
    """Go on with a chain: the keys of all full blocks of `tokens`, of which the first are known."""
    chain = list(keys)
    parent = chain[-1] if chain else seed
    for start in range(len(chain) * block_size, len(tokens) - block_size + 1, block_size):
        parent = sha256(parent + array(_ITEM, tokens[start : start + block_size]).tobytes()).digest()
        chain.append(parent)
    return chain


def num_shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading keys two chains have in common: by bisection, since chains that part never meet again."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """A key maps to a block whose KV is computed for exactly that prefix; a block has at most one key."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.version = 0  # grows with every change of what `find_chain` answers
        self._last_version = 0
        self._last_keys: Sequence[bytes] = ()
        self._last_hits: list[int] = []

    def find_chain(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading keys that are all present.

        The last answer is gone on with: requests with a common prefix are asked about one after the other.
        """
        last, self._last_keys = self._last_keys, keys
        if self._last_version != self.version:
            self._last_version, hits = self.version, []
        else:
            hits = self._last_hits[: len(keys) if keys is last else num_shared(keys, last)]
        find = self._block_of.get
        for key in keys[len(hits) :]:
            if (block := find(key)) is None:
                break
            hits.append(block)
        self._last_hits = hits
        return hits[:]

    def __contains__(self, block: object) -> bool:
        return block in self._key_of

    def publish(self, key: bytes, block: int) -> None:
        """Index a computed block; if the prefix or the block is indexed already, the first one stays."""
        if key in self._block_of or block in self._key_of:
            return
        self._block_of[key] = block
        self._key_of[block] = key
        self.version += 1

    def forget(self, block: int) -> None:
        """Drop a block whose content is about to change."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self.version += 1
