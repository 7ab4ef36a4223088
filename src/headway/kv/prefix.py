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
from collections.abc import Callable, Sequence
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
    return extend_keys([], tokens, block_size, seed, len(tokens))


def extend_keys(keys: Sequence[bytes], tokens: Sequence[int], block_size: int, seed: bytes, count: int) -> list[bytes]:
    """Go on with a chain: the keys of all full blocks of the first `count` tokens, of which the first are known."""
    chain = list(keys)
    parent = chain[-1] if chain else seed
    rest = array(_ITEM, tokens[len(chain) * block_size : count])
    raw, size = rest.tobytes(), block_size * rest.itemsize
    for end in range(size, len(raw) + 1, size):
        parent = sha256(parent + raw[end - size : end]).digest()
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

    def __init__(self, told: Callable[[bytes, bool], object] | None = None) -> None:
        self._told = told  # of each key that comes or goes
        self._block_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}  # of the blocks that are indexed; others only read it
        self._last_keys: Sequence[bytes] = ()  # of the last `find_chain`
        self._last_hits: list[int] = []  # its answer; what is published since only adds to it

    def find_chain(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading keys that are all present; not to be changed.

        The last answer is gone on with: requests with a common prefix are asked about one after the other.
        """
        last, hits, count = self._last_keys, self._last_hits, len(self._last_hits)
        if keys is not last and keys[count - 1 : count] != last[count - 1 : count]:  # else those before are equal too
            hits = hits[: num_shared(keys, last)]
        find, more = self._block_of.get, []
        for key in keys[len(hits) :]:
            if (block := find(key)) is None:
                break
            more.append(block)
        self._last_keys, self._last_hits = keys, hits + more if more else hits
        return self._last_hits

    def block_of(self, key: bytes) -> int | None:
        """The block of this key alone."""
        return self._block_of.get(key)

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Index computed blocks; where the prefix or the block is indexed already, the first one stays."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._block_of and block not in self.key_of:
                self._block_of[key] = block
                self.key_of[block] = key
                if self._told is not None:
                    self._told(key, True)

    def forget(self, block: int) -> None:
        """Drop a block whose content is about to change."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if self._told is not None:
                self._told(key, False)
            if block in self._last_hits:
                self._last_hits = []
