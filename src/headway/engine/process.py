"""One engine process, its socket pair and its page, seen from the API process.

Either side's death is an end of file on the socket: the child exits at once, this side is told. Nothing listens on any
address. What the child runs is named by a command line; this file does not import it. It carries messages and knows
neither requests nor what to do about a death: `supervisor` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, cast

from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.messages import Command, PeerGone, Shutdown
from headway.engine.pulse import STACK_SIGNAL, Beat, PulseReader
from headway.engine.wire import MAX_FRAME_BYTES, FrameReader, encode
from headway.errors import EngineDead, Overloaded

log = logging.getLogger(__name__)

CHILD = ("-P", "-m", "headway.cli.engine_child")
_STACK_LOOKS, _STACK_S = 20, 0.05  # how often to look for stacks that were asked for, and how long to wait each time


class ChildCommand(NamedTuple):
    """How an engine process is started: what the interpreter runs, and what it is told beside its configuration."""

    command: Sequence[str] = CHILD
    log_level: str = "info"
    log_format: str = "text"
    is_another: bool = False  # after one that ended: goes on with its step log
    told: bytes = b""  # for the child's eyes alone; its program knows what it says


class EngineProcess:
    """Owns one child process. It is reaped by `close`, whatever state it is in."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        pulse: PulseReader,
        *,
        max_pending_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._process = process
        self._sock = sock
        self._pulse = pulse
        self._last = Beat()
        self._stacks = ""
        self._transport: asyncio.Transport | None = None
        self.max_pending_bytes = max_pending_bytes

    @classmethod
    def start(cls, config: EngineConfig, how: ChildCommand) -> EngineProcess:
        """Start the child and return at once, before it has imported anything; needs no event loop.

        The command is given `--fd N --pulse-fd N --log-level NAME --log-format NAME`, `--another` if one has ended, and
        `--told-fd N`, a pipe, if there is something that it is told.
        """
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            pulse = PulseReader()
            undo.callback(pulse.close)
            passed = [theirs.fileno(), pulse.fd]
            if how.told:
                told, writes = os.pipe()
                undo.callback(os.close, told)
                with os.fdopen(writes, "wb") as pipe:
                    pipe.write(how.told)  # less than a pipe holds
                passed.append(told)
            # Its own process group, so that Ctrl-C reaches this process alone, which then decides.
            process = subprocess.Popen(
                [
                    *(sys.executable, *how.command, "--fd", str(theirs.fileno()), "--pulse-fd", str(pulse.fd)),
                    *("--log-level", how.log_level, "--log-format", how.log_format),
                    *(["--another"] if how.is_another else []),
                    *(["--told-fd", str(passed[2])] if how.told else []),
                ],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            undo.pop_all()
            for fd in passed[2:]:
                os.close(fd)
        child = cls(process, ours, pulse)
        with suppress(OSError):  # a child that has ended is noticed by `connect`
            ours.sendall(encode(config))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._process.poll()

    @property
    def beat(self) -> Beat:
        """What it does, or did last."""
        if self._pulse.fd >= 0:
            self._last = self._pulse.read()
        return self._last

    @property
    def stacks(self) -> str:
        """What it left of its stacks."""
        if self._pulse.fd >= 0:
            self._stacks = self._pulse.stacks()
        return self._stacks

    @property
    def num_pending(self) -> int:
        """Bytes that wait to reach it."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def connect(self, dispatch: Callable[[list[Any]], None], on_end: Callable[[str], None]) -> None:
        """Begin to listen to the child, in the running event loop; `on_end` is called once, with a reason."""
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: _Reader(self._made, dispatch, on_end), sock=self._sock)

    def _made(self, transport: asyncio.Transport) -> None:
        """Before anything is read: what the child has said already may have to be answered."""
        self._transport = transport

    def send(self, command: Command, *, is_bounded: bool = True) -> None:
        """Hand over a command; a submit is refused while too much waits, unless it is not `is_bounded`."""
        if self._transport is None:
            raise EngineDead("the engine process is not connected; call connect() first")
        # Everything but a submit is small and makes the engine's load no larger; an abort makes it smaller.
        if is_bounded and isinstance(command, Submit) and self.num_pending > self.max_pending_bytes:
            raise Overloaded("the engine is busy and too many requests wait to reach it; try again", retry_after_s=2.0)
        self._transport.write(encode(command))

    async def ask_stacks(self) -> None:
        """Have it write its stacks, even if it is stopped; it may go on after that."""
        for number in (STACK_SIGNAL, signal.SIGCONT):
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
        size = -1
        for _ in range(_STACK_LOOKS):
            await asyncio.sleep(_STACK_S)
            if len(self.stacks) == size > 0 or self.exit_code is not None:
                return
            size = len(self.stacks)

    async def close(self, grace_s: float = 0.0, *, asks: bool = False) -> int:
        """End the child: ask, hang up, kill; its exit code. Neither process nor descriptor is left."""
        if asks and self._transport is not None and not self._transport.is_closing():
            self.send(Shutdown())
            await self._exited(grace_s)
            grace_s = 0.0
        if self._transport is not None:
            self._transport.abort()
        self._sock.close()
        if not await self._exited(grace_s):
            self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        self._last, self._stacks = self.beat, self.stacks
        self._pulse.close()
        return code

    async def _exited(self, timeout_s: float) -> bool:
        if self.exit_code is None and timeout_s > 0:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, timeout_s)
        return self.exit_code is not None


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def num_out_of_memory() -> int:
    """Processes that the system has ended for want of memory since it started; 0 where it does not say."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class _Reader(asyncio.Protocol):
    """Hands on what a child sends; after its end, or a frame that does not decode, nothing more."""

    def __init__(
        self,
        on_made: Callable[[asyncio.Transport], None],
        dispatch: Callable[[list[Any]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._on_made = on_made
        self._dispatch = dispatch
        self._on_end = on_end
        self._frames = FrameReader(is_engine=False)
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_made(cast(asyncio.Transport, transport))  # other event loops have their own class

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            values = self._frames.feed(data)
        except PeerGone as gone:
            log.error("engine connection dropped: %s", gone)
            self._end(str(gone))
        else:
            self._dispatch(values)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error) if error else "its connection closed")

    def _end(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_end(reason)
