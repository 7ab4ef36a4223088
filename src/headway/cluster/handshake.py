"""The first bytes of a connection between machines of a fleet: both ends show that they have the key, neither tells it.

    listener  ─▶  "headway" | version u8 | flags u8 | nonce 32                    flags: 1, it has a key
    dialer    ─▶  "headway" | version u8 | flags u8 | nonce 32 | proof 32
    listener  ─▶  0 u8 | proof 32       or       1 u8 | length u16 | why it refuses

A proof is HMAC-SHA256 under the key over the party, the version and both nonces. Nonces are new with every connection:
what was recorded proves nothing in another one. The party keeps a proof from being sent back as the other's, and from
being of use at a port of another kind. Every part has a fixed length: nothing is parsed before the peer is known. The
dialer proves first: a listener answers anyone who reaches it, a dialer dials only whom it was told. What follows is not
encrypted by this: TLS does that. Each side is a `Talk`, which knows no socket.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import ssl
import struct
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from headway.engine.messages import VERSION
from headway.errors import ConfigError, EngineError

MAGIC = b"headway"
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + 2 + NONCE_BYTES
ANSWER_BYTES = HELLO_BYTES + PROOF_BYTES
MIN_KEY_BYTES = 16
HANDSHAKE_S = 5.0  # for all of it, TLS included
MOST_UNKNOWN, MOST_UNKNOWN_PER_IP = 64, 16  # connections to one port that have not proved who they are
_MOST_REASON_BYTES = 1024
_LENGTH = struct.Struct("<H")

Talk = Generator[int | bytes, bytes, None]
"""One side: yields bytes to send, or how many it waits for, which it then is sent."""


class Parties(NamedTuple):
    """Who talks: in words, and in every proof."""

    listener: str
    dialer: str


FLEET = Parties("front", "engine")
KV = Parties("engine that has KV", "engine that fetches KV")


class HandshakeFailed(EngineError):
    """The peer is not who it should be; the message says why, and is safe to be shown to it."""


class JoinRefused(EngineError):
    """The listener said no, or is not the one that has the key: dialling it again is of no use."""


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


def proof(key: bytes, party: bytes, listener: bytes, dialer: bytes) -> bytes:
    """What only a holder of the key can say about these two nonces."""
    return hmac.digest(key, party + b"\0" + bytes([VERSION]) + listener + dialer, sha256)


def admitting(key: bytes | None, parties: Parties) -> Talk:
    """The listener's side; HandshakeFailed, after the dialer was told why, if it is not to be let in."""
    ours = Hello(VERSION, key is not None, os.urandom(NONCE_BYTES))
    yield ours.encode()
    raw = yield ANSWER_BYTES
    try:
        theirs = Hello.decode(raw)
        _require_version(theirs.version, parties.dialer, parties.listener)
        expected = proof(key or b"", parties.dialer.encode(), ours.nonce, theirs.nonce)
        if not hmac.compare_digest(raw[HELLO_BYTES:], expected):
            ask = f"this {parties.listener} asks for a key and it has none"
            what = f"its key is not that of the {parties.listener}" if theirs.has_key else ask
            raise HandshakeFailed(f"the {parties.dialer} was refused: {what}; give it the fleet's key with --key-file")
    except HandshakeFailed as failure:
        words = str(failure).encode()[:_MOST_REASON_BYTES]
        yield b"\1" + _LENGTH.pack(len(words)) + words
        raise
    yield b"\0" + proof(key or b"", parties.listener.encode(), ours.nonce, theirs.nonce)


def greeting(key: bytes | None, parties: Parties) -> Talk:
    """The dialer's side; HandshakeFailed or JoinRefused if it is not let in there."""
    listener = parties.listener
    theirs = Hello.decode((yield HELLO_BYTES))
    if key is not None and not theirs.has_key:
        raise JoinRefused(f"the {listener} has no key and cannot prove who it is; start it with the same key")
    ours = Hello(VERSION, key is not None, os.urandom(NONCE_BYTES))
    yield ours.encode() + proof(key or b"", parties.dialer.encode(), theirs.nonce, ours.nonce)
    if (yield 1) != b"\0":
        (length,) = _LENGTH.unpack((yield _LENGTH.size))
        raise JoinRefused((yield min(length, _MOST_REASON_BYTES)).decode(errors="replace"))
    _require_version(theirs.version, listener, parties.dialer)
    expected = proof(key or b"", listener.encode(), theirs.nonce, ours.nonce)
    if not hmac.compare_digest((yield PROOF_BYTES), expected):
        raise JoinRefused(f"the {listener} did not prove that it has the key")


async def admit_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes | None) -> None:
    """A front's side with an engine."""
    await _converse(admitting(key, FLEET), reader, writer)


async def greet_front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes | None) -> None:
    """An engine's side with a front."""
    await _converse(greeting(key, FLEET), reader, writer)


async def _converse(talk: Talk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    got = None
    while True:
        try:
            said = next(talk) if got is None else talk.send(got)
        except StopIteration:
            return
        if isinstance(said, bytes):
            writer.write(said)
        got = b"" if isinstance(said, bytes) else await reader.readexactly(said)


def has_room_for(unknown: Counter[str], host: str) -> bool:
    """True if one more connection from this address may wait until it has proved who it is."""
    return unknown.total() < MOST_UNKNOWN and unknown[host] < MOST_UNKNOWN_PER_IP


def is_loopback(host: str) -> bool:
    """True for an address that no other machine reaches."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


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


def host_of(where: str) -> str:
    """Of an address that was made here; empty if there is none in it."""
    return where.rpartition(":")[0].removeprefix("[").removesuffix("]")


def trusting(ca_file: str | None) -> ssl.SSLContext | None:
    """TLS for an engine that dials: the front's certificate must be signed by this file; None without one."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(Path(ca_file).expanduser()))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot use the file of certificates {ca_file}: {reason}; give PEM with --tls-ca") from None


def certified(cert: str, key: str | None, options: str) -> ssl.SSLContext:
    """TLS for a listener, from PEM files; the key may be in the certificate's. `options` are named in errors."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password="")  # a key with a password is refused, not asked for at a terminal
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot use the certificate {cert} with the key {key or cert}: {reason}; give PEM files that belong "
            f"together with {options}"
        ) from None
    return context
