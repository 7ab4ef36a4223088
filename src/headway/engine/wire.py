"""The bytes between the API process and the engine process.

    frame:  length u32 little-endian | version u8 | msgpack of one tagged array      (length counts version + body)

Both directions are one byte stream, over a socket pair or between machines. Nothing is pickled; every frame has a
type, and a frame that is too long, of another version or does not decode ends the connection with `PeerGone`. This
file owns framing and encoding; `child` and `process` decide what is sent and when.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from headway.config import EngineConfig
from headway.engine.client import Output, Submit
from headway.engine.messages import (
    VERSION,
    Abort,
    AdaptersNow,
    Alive,
    BlockNews,
    Command,
    Dismiss,
    Explain,
    Explained,
    Fatal,
    GetStats,
    Joining,
    Leaving,
    LoadAdapter,
    LookedUp,
    LookUp,
    Message,
    PeerGone,
    Ready,
    Reconfigure,
    Reconfigured,
    Shutdown,
    StatsReply,
    UnloadAdapter,
    WatchBlocks,
)
from headway.engine.published import Published
from headway.errors import EngineError
from headway.values.plan import Emission

MAX_FRAME_BYTES = 64 * 1024 * 1024
_RECV_BYTES = 256 * 1024
_HEADER = struct.Struct("<IB")


class _Configure(msgspec.Struct, tag=0, array_like=True):
    value: EngineConfig


class _Submit(msgspec.Struct, tag=1, array_like=True):
    value: Submit


class _Abort(msgspec.Struct, tag=2, array_like=True):
    value: Abort


class _GetStats(msgspec.Struct, tag=3, array_like=True):
    value: GetStats


class _Shutdown(msgspec.Struct, tag=4, array_like=True):
    value: Shutdown


class _Reconfigure(msgspec.Struct, tag=5, array_like=True):
    value: Reconfigure


class _Explain(msgspec.Struct, tag=6, array_like=True):
    value: Explain


class _LookUp(msgspec.Struct, tag=7, array_like=True):
    value: LookUp


class _WatchBlocks(msgspec.Struct, tag=8, array_like=True):
    value: WatchBlocks


class _LoadAdapter(msgspec.Struct, tag=9, array_like=True):
    value: LoadAdapter


class _UnloadAdapter(msgspec.Struct, tag=10, array_like=True):
    value: UnloadAdapter


class _Dismiss(msgspec.Struct, tag=12, array_like=True):
    value: Dismiss


class _Ready(msgspec.Struct, tag=16, array_like=True):
    value: Ready


class _Emission(msgspec.Struct, tag=17, array_like=True):
    value: Emission[Output]


class _Output(msgspec.Struct, tag=18, array_like=True):
    value: Output


class _StatsReply(msgspec.Struct, tag=19, array_like=True):
    value: StatsReply


class _Fatal(msgspec.Struct, tag=20, array_like=True):
    value: Fatal


class _Reconfigured(msgspec.Struct, tag=21, array_like=True):
    value: Reconfigured


class _Explained(msgspec.Struct, tag=22, array_like=True):
    value: Explained


class _LookedUp(msgspec.Struct, tag=23, array_like=True):
    value: LookedUp


class _Published(msgspec.Struct, tag=24, array_like=True):
    value: Published


class _BlockNews(msgspec.Struct, tag=25, array_like=True):
    value: BlockNews


class _AdaptersNow(msgspec.Struct, tag=26, array_like=True):
    value: AdaptersNow


class _Joining(msgspec.Struct, tag=32, array_like=True):
    value: Joining


class _Alive(msgspec.Struct, tag=33, array_like=True):
    value: Alive


class _Leaving(msgspec.Struct, tag=34, array_like=True):
    value: Leaving


_ToEngine = (
    _Configure
    | _Submit
    | _Abort
    | _GetStats
    | _Shutdown
    | _Reconfigure
    | _Explain
    | _LookUp
    | _WatchBlocks
    | _LoadAdapter
    | _UnloadAdapter
    | _Dismiss
)
_FromEngine = (
    _Ready
    | _Emission
    | _Output
    | _StatsReply
    | _Fatal
    | _Reconfigured
    | _Explained
    | _LookedUp
    | _Published
    | _BlockNews
    | _AdaptersNow
    | _Joining
    | _Alive
    | _Leaving
)
_FRAMES: dict[type, Any] = {
    EngineConfig: _Configure,
    Submit: _Submit,
    Abort: _Abort,
    GetStats: _GetStats,
    Shutdown: _Shutdown,
    Reconfigure: _Reconfigure,
    Ready: _Ready,
    Emission: _Emission,
    Output: _Output,
    StatsReply: _StatsReply,
    Fatal: _Fatal,
    Reconfigured: _Reconfigured,
    Explain: _Explain,
    Explained: _Explained,
    LookUp: _LookUp,
    LookedUp: _LookedUp,
    Published: _Published,
    WatchBlocks: _WatchBlocks,
    BlockNews: _BlockNews,
    LoadAdapter: _LoadAdapter,
    UnloadAdapter: _UnloadAdapter,
    AdaptersNow: _AdaptersNow,
    Dismiss: _Dismiss,
    Joining: _Joining,
    Alive: _Alive,
    Leaving: _Leaving,
}


def encode(value: Command | Message | EngineConfig) -> bytes:
    """One whole frame."""
    body = msgspec.msgpack.encode(_FRAMES[type(value)](value))
    return _HEADER.pack(len(body) + 1, VERSION) + body


class FrameReader:
    """Bytes in, values out. After it has raised `PeerGone` it is not to be used again."""

    def __init__(self, *, is_engine: bool, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        kinds: Any = _ToEngine if is_engine else _FromEngine
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The values that are complete with these bytes, in order."""
        buffer = self._buffer
        buffer += data
        values: list[Any] = []
        at = 0
        while len(buffer) - at >= _HEADER.size:
            length, version = _HEADER.unpack_from(buffer, at)
            if version != VERSION:
                raise PeerGone(f"the peer speaks wire version {version}; this side speaks {VERSION}")
            if not 1 <= length <= self._max_frame_bytes:
                raise PeerGone(f"the peer sent a frame of {length} bytes; allowed: 1 to {self._max_frame_bytes}")
            end = at + 4 + length
            if len(buffer) < end:
                break
            values.append(self._decode(bytes(memoryview(buffer)[at + _HEADER.size : end])))
            at = end
        del buffer[:at]
        return values

    def _decode(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(body).value
        except (msgspec.MsgspecError, UnicodeError, RecursionError, EngineError) as error:
            raise PeerGone(f"the peer sent a frame that does not decode: {error}") from error


class SocketPort:
    """The engine's end. It never blocks on a slow reader until `max_pending_bytes` wait to be read."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_pending_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader(is_engine=True, max_frame_bytes=max_frame_bytes)
        self._received: list[Any] = []
        self._woken, self._waker = os.pipe()  # for as long as this process runs
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._pending = bytearray()
        self._max_pending_bytes = max_pending_bytes

    def configuration(self) -> EngineConfig:
        """The first value of the connection."""
        while not self._received:
            self._wait()
            self._read()
        first = self._received.pop(0)
        if not isinstance(first, EngineConfig):
            raise PeerGone(f"the peer began with {type(first).__name__}; allowed: EngineConfig")
        return first

    def receive(self, timeout_s: float | None) -> list[Command]:
        """Commands that have arrived; if there is none, wait so long, or for ever with None."""
        self._read()
        while not self._received and timeout_s != 0:
            is_readable = self._wait(timeout_s)
            self._read()
            if (timeout_s is not None and not is_readable) or self._was_woken():
                break
        commands, self._received = self._received, []
        return commands

    def wake(self) -> None:
        """Let `receive` return at once, now or when it waits next; from any thread."""
        with suppress(BlockingIOError):  # as many wake-ups wait as the pipe takes: one is enough
            os.write(self._waker, b"w")

    def _was_woken(self) -> bool:
        try:
            return bool(os.read(self._woken, 4096))
        except BlockingIOError:
            return False

    def send(self, messages: Iterable[Message]) -> None:
        """Hand over messages in order."""
        for message in messages:
            self._pending += encode(message)
        self._flush()
        while len(self._pending) > self._max_pending_bytes:
            select.select([], [self._sock], [])
            self._flush()

    def drain(self) -> None:
        """Wait until everything sent has left this process."""
        while self._pending:
            select.select([], [self._sock], [])
            self._flush()

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Wait for something to read, and go on writing meanwhile; whether there is something to read."""
        fd = self._sock.fileno()
        readable, writable, _ = select.select([fd, self._woken], [fd] if self._pending else [], [], timeout_s)
        if writable:
            self._flush()
        return bool(readable)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerGone(f"the connection broke: {error}") from error
        if not data:
            raise PeerGone("the peer has ended")
        self._received.extend(self._reader.feed(data))

    def _flush(self) -> None:
        while self._pending:
            try:
                num_sent = self._sock.send(self._pending)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGone(f"the connection broke: {error}") from error
            del self._pending[:num_sent]
