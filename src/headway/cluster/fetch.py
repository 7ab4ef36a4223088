"""The verb by which KV moves between engines: fetch(keys, lease) -> blocks, each with its xxh3-128.

    asks      "HWF1" | identity 32 | lease ms u32 | count u32 | keys 32 x count | xxh3-64 of all that 8
    answers   records (`engine.tier.record`) of the leading keys that are there, in order, then one without key and data

The engine that goes on with a request pulls; nothing writes into another engine's memory. Blocks are asked for by
content: equal keys and equal identities mean equal bits, whichever engine computed them. This file knows the bytes and
no socket; `links` carries them, `fetch_server` and `fetch_peers` are the two ends.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from headway.engine.tier.record import KEY_BYTES, NO_KEY, Buffer, checksum, pack_header

_MAGIC = b"HWF1"
_START = struct.Struct("<4s32sII")
START_BYTES = _START.size
MOST_KEYS = 1 << 16
END = pack_header(NO_KEY, 0, checksum(b""))


class Fetch(NamedTuple):
    """What a peer asks for."""

    identity: bytes
    keys: list[bytes]
    lease_s: float


def pack_fetch(fetch: Fetch) -> bytes:
    """The bytes of a request."""
    assert 0 < len(fetch.keys) <= MOST_KEYS
    raw = _START.pack(_MAGIC, fetch.identity, int(fetch.lease_s * 1000), len(fetch.keys)) + b"".join(fetch.keys)
    return raw + xxh3_64_digest(raw)


def rest_bytes(start: Buffer) -> int | None:
    """How many bytes follow the first START_BYTES of a request; None: it is none."""
    magic, _, _, count = _START.unpack(start)
    return count * KEY_BYTES + 8 if magic == _MAGIC and 0 < count <= MOST_KEYS else None


def unpack_fetch(raw: Buffer) -> Fetch | None:
    """What a request says; None: it is not whole."""
    data = bytes(raw)
    if len(data) < START_BYTES + 8 or rest_bytes(data[:START_BYTES]) != len(data) - START_BYTES:
        return None
    if xxh3_64_digest(data[:-8]) != data[-8:]:
        return None
    _, identity, lease_ms, count = _START.unpack_from(data)
    keys = [data[START_BYTES + i * KEY_BYTES :][:KEY_BYTES] for i in range(count)]
    return Fetch(identity, keys, lease_ms / 1000)
