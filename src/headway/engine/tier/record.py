"""A KV block as bytes outside the pool: on disk and between engines it is this header and then its data.

    magic 4 | length u32 | key 32 | xxh3-128 of the data 16 | xxh3-64 of all that 8        64 bytes, little-endian

The header's own checksum tells a torn or shifted header from a sound one, the data's checksum a flipped bit. Neither
is secret: who may write what is read here is trusted, hardware and half-written files are not.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

_MAGIC = b"HWB1"
_FIELDS = struct.Struct("<4sI32s16s")
HEADER_BYTES = _FIELDS.size + 8
KEY_BYTES = 32
NO_KEY = bytes(KEY_BYTES)

Buffer = bytes | bytearray | memoryview


class BlockHeader(NamedTuple):
    """What a sound header says."""

    key: bytes
    num_bytes: int
    checksum: bytes


def checksum(data: Buffer) -> bytes:
    """Of a block's data."""
    return xxh3_128_digest(data)


def pack_header(key: bytes, num_bytes: int, checksum: bytes) -> bytes:
    """The header of a block."""
    fields = _FIELDS.pack(_MAGIC, num_bytes, key, checksum)
    return fields + xxh3_64_digest(fields)


def unpack_header(raw: Buffer) -> BlockHeader | None:
    """What a header says; None: it is not whole."""
    if len(raw) != HEADER_BYTES or xxh3_64_digest(raw[: _FIELDS.size]) != raw[_FIELDS.size :]:
        return None
    magic, num_bytes, key, told = _FIELDS.unpack_from(raw)
    return BlockHeader(key, num_bytes, told) if magic == _MAGIC else None


def is_whole(header: BlockHeader, data: Buffer) -> bool:
    """True if this is the data that the header was made for."""
    return len(data) == header.num_bytes and checksum(data) == header.checksum
