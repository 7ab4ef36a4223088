"""What the server and the process that makes vectors say to each other: frames of a length and MessagePack.

──▶ Setup      ◀── Opened
──▶ Texts      ◀── Vectors     one for each, in order
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

MAX_FRAME_BYTES = 1 << 30
HEAD_BYTES = 4
T = TypeVar("T")


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The first frame: which model, computed how."""

    model: str
    cache_dir: str | None
    kernels: str
    threads: int | None
    log_level: str
    log_format: str


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """The model is loaded; or `error` says why it cannot be."""

    size: int = 0
    max_tokens: int = 0
    vocab_size: int = 0
    dtype: str = ""
    kernels: str = ""
    error: str = ""


class Texts(msgspec.Struct, array_like=True, frozen=True):
    texts: list[list[int]]


class Vectors(msgspec.Struct, array_like=True, frozen=True):
    """Float32 numbers, little end first, of all texts end to end; or `error`."""

    data: bytes = b""
    error: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD_BYTES, "little") + data


def decode(data: bytes, kind: type[T]) -> T:
    """The message in a frame, without its length; EOFError if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EOFError(str(error)) from None
