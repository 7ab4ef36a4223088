"""The engine in a child process over one socket pair, seen from the API process.

Either side's death is an end of file on the socket: the child exits at once, this side ends every stream.
Nothing listens on any address. What the child runs is named by a command line; this file does not import it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence

from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.messages import Command, PeerGone, Shutdown
from headway.engine.streams import StreamClient
from headway.engine.wire import MAX_FRAME_BYTES, FrameReader, encode
from headway.errors import EngineDead, Overloaded

log = logging.getLogger(__name__)

CHILD = ("-P", "-m", "headway.cli.engine_child")


class ProcessClient(StreamClient):
    """Owns one child process. It is reaped by `close`, whatever state it is in."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        *,
        max_buffer_bytes: int = 1024 * 1024,
        max_pending_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self._process = process
        self._sock = sock
        self._transport: asyncio.Transport | None = None
        self._max_pending_bytes = max_pending_bytes

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] = CHILD,
        log_level: str = "info",
        log_format: str = "text",
        max_buffer_bytes: int = 1024 * 1024,
    ) -> ProcessClient:
        """Start the child and return at once, before it has imported anything; needs no event loop.

        `command` is what the interpreter runs; it is given `--fd N --log-level NAME --log-format NAME`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # Its own process group, so that Ctrl-C reaches this process alone, which then decides.
            process = subprocess.Popen(
                [
                    *(sys.executable, *command, "--fd", str(theirs.fileno())),
                    *("--log-level", log_level, "--log-format", log_format),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        client = cls(process, ours, max_buffer_bytes=max_buffer_bytes)
        try:
            ours.sendall(encode(config))
        except OSError as error:
            client._fail(EngineDead(f"the engine process did not take its configuration: {error}"))
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self) -> None:
        """Begin to listen to the child, in the running event loop."""
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Reader(self), sock=self._sock)

    async def close(self, grace_s: float = 5.0) -> None:
        """End the child: ask, then hang up, then kill. No process is left when this returns."""
        if self._transport is not None and self._failure is None and self._info is not None:
            self._send(Shutdown())
            await self._exited(grace_s)
        if self._transport is not None:
            self._transport.abort()
        self._sock.close()
        if not await self._exited(grace_s):
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._fail(EngineDead("the engine was closed"))

    async def _exited(self, timeout_s: float) -> bool:
        try:
            await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, command: Command) -> None:
        if self._transport is None:
            raise EngineDead("the engine process is not connected; call connect() first")
        # Everything but a submit is small and makes the engine's load no larger; an abort makes it smaller.
        if isinstance(command, Submit) and self._transport.get_write_buffer_size() > self._max_pending_bytes:
            raise Overloaded("the engine is busy and too many requests wait to reach it; try again", retry_after_s=2.0)
        self._transport.write(encode(command))

    def _lost(self, reason: str) -> None:
        """The connection is over: close it, so that the child ends too, and fail every open request."""
        if self._transport is not None:
            self._transport.abort()
        code = self._process.poll()
        ended = "" if code is None else f" (exit code {code})"
        self._fail(EngineDead(f"the engine process has ended{ended}: {reason}"))


class _Reader(asyncio.Protocol):
    """Feeds a client with what its child sends."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._frames = FrameReader(is_engine=False)

    def data_received(self, data: bytes) -> None:
        try:
            self._client._dispatch(self._frames.feed(data))
        except PeerGone as gone:
            log.error("engine connection dropped: %s", gone)
            self._client._lost(str(gone))

    def connection_lost(self, error: Exception | None) -> None:
        self._client._lost(str(error) if error else "its connection closed")
