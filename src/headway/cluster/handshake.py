"""The first bytes between a front and an engine that dials it: both show that they have the key, and neither tells it.

    front   ─▶  "headway" | version u8 | flags u8 | nonce 32                    flags: 1, it has a key
    engine  ─▶  "headway" | version u8 | flags u8 | nonce 32 | proof 32
    front   ─▶  0 u8 | proof 32       or       1 u8 | length u16 | why it refuses

A proof is HMAC-SHA256 under the key over the role, the version and both nonces. Nonces are new with every connection:
what was recorded proves nothing in another one. The role keeps a proof from being sent back as the other's.
Every part has a fixed length: nothing is parsed before the peer is known. The engine proves first: a front answers
anyone who reaches it, an engine dials only whom it was told. What follows is not encrypted by this: TLS does that.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import ssl
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headway.engine.wire import VERSION
from headway.errors import ConfigError, EngineError

MAGIC = b"headway"
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + 2 + NONCE_BYTES
ANSWER_BYTES = HELLO_BYTES + PROOF_BYTES
MIN_KEY_BYTES = 16
HANDSHAKE_S = 5.0  # for all of it, TLS included
_MOST_REASON_BYTES = 1024
_LENGTH = struct.Struct("<H")


class HandshakeFailed(EngineError):
    """The peer is not who it should be; the message says why, and is safe to be shown to it."""


class JoinRefused(EngineError):
    """The front said no, or is not the one that has the key: dialling it again is of no use."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What either side says of itself before anything is proved."""

    version: int
    has_key: bool
    nonce: bytes

    def encode(self) -> bytes:
        return MAGIC + bytes([self.version, self.has_key]) + self.nonce

    @staticmethod
    def decode(raw: bytes) -> Hello:
        if not raw.startswith(MAGIC):
            raise HandshakeFailed("the peer does not speak headway's protocol; does only one side use TLS?")
        version, flags = raw[len(MAGIC)], raw[len(MAGIC) + 1]
        return Hello(version, bool(flags & 1), raw[len(MAGIC) + 2 : HELLO_BYTES])


def proof(key: bytes, role: bytes, front: bytes, engine: bytes) -> bytes:
    """What only a holder of the key can say about these two nonces."""
    return hmac.digest(key, role + b"\0" + bytes([VERSION]) + front + engine, sha256)


async def admit_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes | None) -> None:
    """The front's side; HandshakeFailed, after the engine was told why, if it is not to be let in."""
    ours = Hello(VERSION, key is not None, os.urandom(NONCE_BYTES))
    writer.write(ours.encode())
    raw = await reader.readexactly(ANSWER_BYTES)
    try:
        theirs = Hello.decode(raw)
        _require_version(theirs.version, "engine", "front")
        expected = proof(key or b"", b"engine", ours.nonce, theirs.nonce)
        if not hmac.compare_digest(raw[HELLO_BYTES:], expected):
            what = "its key is not the front's" if theirs.has_key else "this front asks for a key and it has none"
            raise HandshakeFailed(f"the engine was refused: {what}; give it the front's key with --key-file")
    except HandshakeFailed as failure:
        refuse(writer, str(failure))
        raise
    writer.write(b"\0" + proof(key or b"", b"front", ours.nonce, theirs.nonce))


def refuse(writer: asyncio.StreamWriter, reason: str) -> None:
    """Say why an engine is not let in."""
    words = reason.encode()[:_MOST_REASON_BYTES]
    writer.write(b"\1" + _LENGTH.pack(len(words)) + words)


async def greet_front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes | None) -> None:
    """The engine's side; HandshakeFailed or JoinRefused if it cannot join there."""
    theirs = Hello.decode(await reader.readexactly(HELLO_BYTES))
    if key is not None and not theirs.has_key:
        raise JoinRefused("the front has no key and cannot prove who it is; start it with the same --engine-key-file")
    ours = Hello(VERSION, key is not None, os.urandom(NONCE_BYTES))
    writer.write(ours.encode() + proof(key or b"", b"engine", theirs.nonce, ours.nonce))
    if (await reader.readexactly(1)) != b"\0":
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        raise JoinRefused((await reader.readexactly(min(length, _MOST_REASON_BYTES))).decode(errors="replace"))
    _require_version(theirs.version, "front", "engine")
    expected = proof(key or b"", b"front", theirs.nonce, ours.nonce)
    if not hmac.compare_digest(await reader.readexactly(PROOF_BYTES), expected):
        raise JoinRefused("the front did not prove that it has the key")


def _require_version(got: int, peer: str, ours: str) -> None:
    if got != VERSION:
        raise HandshakeFailed(
            f"the {peer} speaks wire version {got} and the {ours} {VERSION}; run the same version of headway on both"
        )


def read_key(key: str | None, file: str | None) -> bytes | None:
    """The shared key, given itself or as a file; ConfigError if there are two, or it is too short to be one."""
    if key is not None and file is not None:
        raise ConfigError("a key and a file with one are given; keep one of them")
    if file is not None:
        try:
            key = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(f"cannot read the key file {file}: {reason}") from None
    if key is None:
        return None
    raw = key.strip().encode()
    if len(raw) < MIN_KEY_BYTES:
        what = "openssl rand -hex 32 > FILE makes one"
        raise ConfigError(f"the key of engines has {len(raw)} characters; allowed: {MIN_KEY_BYTES} or more; {what}")
    return raw


def parse_address(text: str, name: str) -> tuple[str, int]:
    """HOST:PORT, [IPV6]:PORT; ConfigError names the option."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{name} is {text!r}; allowed: HOST:PORT, such as 10.0.0.1:7500")
    return host, int(port)


def trusting(ca_file: str | None) -> ssl.SSLContext | None:
    """TLS for an engine that dials: the front's certificate must be signed by this file; None without one."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(Path(ca_file).expanduser()))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot use the file of certificates {ca_file}: {reason}; give PEM with --tls-ca") from None
