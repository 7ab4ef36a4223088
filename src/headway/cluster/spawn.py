"""Starts the process of an engine that joins fronts: for a command line, or a keeper of engines elsewhere.

What it is to do goes over a socket and not by its arguments, since a key is among it. The child exits with the socket:
it lives no longer than the process that started it, however that ends.

    engine = start_joining(config, JoinConfig(join="10.0.0.1:7500"))
    engine.wait_ready()       # joins as soon as it is built
    engine.end()              # what it holds goes on elsewhere
"""

from __future__ import annotations

import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from headway.cluster.join import JoinConfig
from headway.config import EngineConfig
from headway.errors import EngineDead

JOINING = ("-P", "-m", "headway.cli.join_child")
READY = b"R"
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 20


class Orders(msgspec.Struct):
    """What a joining engine is started with."""

    engine: EngineConfig
    join: JoinConfig
    log_level: str = "info"
    log_format: str = "text"
    is_another: bool = False  # after one that ended: goes on with its step log


@dataclass(slots=True)
class JoiningProcess:
    """One child and this side's end of its socket, whose closing ends it."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until it is built and dials; False if time is over. EngineDead if it ended before."""
        readable, _, _ = select.select([self.sock], [], [], timeout_s)
        if not readable:
            return False
        if self.sock.recv(1, socket.MSG_PEEK) != READY:
            raise EngineDead(f"the engine ended with exit code {self.process.wait()} before it was ready; see its log")
        return True

    def end(self, grace_s: float = 5.0) -> int:
        """Have it tell its fronts and end, or end it; its exit code."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.sock.close()


def start_joining(
    engine: EngineConfig,
    join: JoinConfig,
    *,
    log_level: str = "info",
    log_format: str = "text",
    is_another: bool = False,
    command: Sequence[str] = JOINING,
    pulse_fd: int | None = None,
    dies_with_thread: bool = False,
) -> JoiningProcess:
    """Start the process and return at once.

    With `pulse_fd`, of a `PulseReader`, it shows what it does. With `dies_with_thread` the system ends it when the
    calling thread ends, even if it could not read its socket (Linux).
    """
    ours, theirs = socket.socketpair()
    with theirs:
        arguments, fds = [*command, "--parent-fd", str(theirs.fileno())], [theirs.fileno()]
        if pulse_fd is not None:
            arguments, fds = [*arguments, "--pulse-fd", str(pulse_fd)], [*fds, pulse_fd]
        if dies_with_thread:
            arguments.append("--die-with-parent")
        try:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the process that started it, which then decides
            )
        except OSError:
            ours.close()
            raise
    raw = msgspec.msgpack.encode(Orders(engine, join, log_level, log_format, is_another))
    with suppress(OSError):  # a child that has ended is noticed by its exit code
        ours.sendall(_LENGTH.pack(len(raw)) + raw)
    return JoiningProcess(process, ours)


def receive_orders(sock: socket.socket) -> Orders:
    """The child's side: what it is to do."""
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if length > _MOST_BYTES:
        raise EngineDead(f"the orders have {length} bytes; allowed: {_MOST_BYTES}")
    return msgspec.msgpack.decode(_receive(sock, length), type=Orders)


def _receive(sock: socket.socket, count: int) -> bytes:
    raw = bytearray()
    while len(raw) < count:
        more = sock.recv(count - len(raw))
        if not more:
            raise EngineDead("the parent ended before it said what to do")
        raw += more
    return bytes(raw)
