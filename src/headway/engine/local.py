"""An engine on a thread of this process: for tests and for embedding in other programs.

Same protocol as the engine process and the same loop; the engine shares this process's fate and its interpreter
lock, which is why the server does not use it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from headway.engine.child import ServedEngine, serve
from headway.engine.messages import Command, Message, PeerGone, Shutdown
from headway.engine.streams import StreamClient
from headway.errors import EngineDead


class _QueuePort:
    """The engine's end: a queue in, calls into the client's event loop out."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatch: Callable[[Iterable[Message]], None]) -> None:
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: wake up
        self._loop = loop
        self._dispatch = dispatch

    def receive(self, timeout_s: float | None) -> Sequence[Command]:
        commands: list[Command | None] = []
        try:
            if timeout_s != 0:
                commands.append(self.commands.get(timeout=timeout_s))
            while True:
                commands.append(self.commands.get_nowait())
        except queue.Empty:
            return [command for command in commands if command is not None]

    def wake(self) -> None:
        self.commands.put(None)

    def send(self, messages: Iterable[Message]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatch, list(messages))
        except RuntimeError as error:
            raise PeerGone("the client's event loop has ended") from error


class LocalClient(StreamClient):
    """Owns one engine thread; `close` ends it."""

    def __init__(self, *, max_buffer_bytes: int = 1024 * 1024) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self._port: _QueuePort | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    async def start(cls, build: Callable[[], ServedEngine], *, max_buffer_bytes: int = 1024 * 1024) -> LocalClient:
        """Build an engine on its own thread and wait until it takes requests."""
        client = cls(max_buffer_bytes=max_buffer_bytes)
        loop = asyncio.get_running_loop()
        port = client._port = _QueuePort(loop, client._dispatch)

        def main() -> None:
            try:
                serve(port, build, owns_process=False)
            finally:
                # The loop may have ended with the program; then there is no client to notify.
                if not loop.is_closed():
                    loop.call_soon_threadsafe(client._fail, EngineDead("the engine has ended"))

        client._thread = threading.Thread(target=main, name="headway-engine", daemon=True)
        client._thread.start()
        await client.ready()
        return client

    async def close(self) -> None:
        """End the engine; every open stream gets a terminal output."""
        if self._thread is not None:
            self._send(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self._fail(EngineDead("the engine was closed"))

    def _send(self, command: Command) -> None:
        assert self._port is not None
        self._port.commands.put(command)
