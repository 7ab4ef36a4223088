"""Dials fronts for an engine, on a thread of its own: connects, shakes hands, reads, and dials again when one is gone.

It also says four times a second that the engine is there and whether its loop turns, which the engine's own thread
cannot do in the middle of a step. What commands mean is `fronts`' affair.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from headway.cluster.fronts import Front, FrontsPort
from headway.cluster.handshake import HANDSHAKE_S, HandshakeFailed, JoinRefused, greet_front, parse_address
from headway.engine.client import Submit
from headway.engine.messages import (
    Abort,
    Alive,
    Dismiss,
    Explain,
    GetStats,
    LoadAdapter,
    LookUp,
    PeerGone,
    Reconfigure,
    Shutdown,
    UnloadAdapter,
    WatchBlocks,
)
from headway.engine.wire import MAX_FRAME_BYTES, FrameReader, encode
from headway.errors import ConfigError

log = logging.getLogger(__name__)

ALIVE_S = 0.25
FIRST_S, LONGEST_S = 0.1, 2.0  # between two attempts to reach a front; twice as long after each
_LASTING_S = 5.0  # a connection that held so long was a good one: the next attempt comes soon
_READ_BYTES = 256 * 1024
_UNACKNOWLEDGED_MS = 10_000  # after so long a front that does not acknowledge is gone
_Address = tuple[str, int]
_COMMANDS = (Submit, Abort, GetStats, Reconfigure, Explain, LookUp, WatchBlocks, LoadAdapter, UnloadAdapter)


class Dialer:
    """One task per address; it ends when told to, or when no front is left that may be dialled again."""

    def __init__(
        self,
        addresses: Sequence[_Address],
        key: bytes | None,
        tls: ssl.SSLContext | None,
        port: FrontsPort,
        alive: Callable[[], Alive],
    ) -> None:
        self._addresses, self._key, self._tls, self._port, self._alive = addresses, key, tls, port, alive
        self._numbers = count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="headway-dial", daemon=True)
        self.refusals: list[str] = []  # of fronts that are not dialled again
        self._num_left = len(addresses)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float = 2.0) -> None:
        """Send what waits to be sent, and end."""
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(self._end)
            self._thread.join(grace_s)

    def _end(self) -> None:
        self._stopping.set()
        for writer in self._writers:
            writer.close()  # after what waits

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            log.exception("the thread that dials fronts failed; the engine ends")
            self._port.stop()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.gather(*(self._keep(address) for address in self._addresses))

    async def _keep(self, address: _Address) -> None:
        """Be connected to one front for as long as it wants this engine."""
        loop, where = asyncio.get_running_loop(), f"{address[0]}:{address[1]}"
        pause_s, is_first = FIRST_S, True
        while not self._stopping.is_set():
            began, why = loop.time(), ""
            try:
                await self._visit(address, where)
                if self._port.is_ending:
                    log.info("left the front at %s", where)
                    return
                log.warning("the connection to the front at %s has closed; it is dialled again", where)
            except (JoinRefused, _Dismissed) as end:
                self._leave(where, end)
                return
            except TimeoutError:
                why = f"it did not answer within {HANDSHAKE_S:g} s; if it speaks TLS, give --tls-ca"
            except ssl.SSLCertVerificationError as error:
                why = f"its certificate is not trusted: {error.verify_message}; see --tls-ca"
            except (OSError, EOFError, HandshakeFailed, PeerGone) as error:
                why = str(error) or "the connection was closed"
            if why and not self._stopping.is_set():
                log.log(logging.WARNING if is_first else logging.DEBUG, "the front at %s: %s", where, why)
            is_first = not why
            pause_s = FIRST_S if loop.time() - began > _LASTING_S else pause_s
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * random.uniform(0.7, 1.3)):
                    await self._stopping.wait()
            pause_s = min(LONGEST_S, 2 * pause_s)

    def _leave(self, where: str, end: Exception) -> None:
        is_refused = isinstance(end, JoinRefused)
        log.log(logging.ERROR if is_refused else logging.INFO, "the front at %s: %s; it is left", where, end)
        if is_refused:
            self.refusals.append(f"the front at {where} refused this engine: {end}")
        self._num_left -= 1
        if not self._num_left:
            self._port.stop()

    async def _visit(self, address: _Address, where: str) -> None:
        """One connection, from the first byte to the last; returns when the front has closed it."""
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(*address, ssl=self._tls, limit=_READ_BYTES)
        front: Front | None = None
        self._writers.add(writer)
        try:
            _tune(writer.get_extra_info("socket"))
            self._require_another(writer)
            async with asyncio.timeout(HANDSHAKE_S):
                await greet_front(reader, writer, self._key)
            front = Front(next(self._numbers), where, self._writing(writer))
            self._port.attach(front)
            log.info("joined the front at %s", where)
            beating = asyncio.create_task(self._beat(writer))
            try:
                await self._read(reader, front)
            finally:
                beating.cancel()
        finally:
            self._writers.discard(writer)
            if front is not None:
                self._port.detach(front)
            if self._stopping.is_set():
                writer.close()
            else:
                writer.transport.abort()

    def _require_another(self, writer: asyncio.StreamWriter) -> None:
        """JoinRefused: it is a front that is connected, by another of its names."""
        peer = writer.get_extra_info("peername")
        if any(peer == each.get_extra_info("peername") for each in self._writers if each is not writer):
            raise JoinRefused(f"it is the front at {peer[0]}:{peer[1]}, which is named twice in --join")

    def _writing(self, writer: asyncio.StreamWriter) -> Callable[[bytes], None]:
        loop = asyncio.get_running_loop()

        def write_here(raw: bytes) -> None:
            if writer.transport.is_closing():
                return
            if writer.transport.get_write_buffer_size() > MAX_FRAME_BYTES:
                log.error("a front does not read what it is sent: its connection is dropped")
                writer.transport.abort()
                return
            writer.write(raw)

        def write(raw: bytes) -> None:
            with suppress(RuntimeError):  # the loop has ended, and the engine will
                loop.call_soon_threadsafe(write_here, raw)

        return write

    async def _read(self, reader: asyncio.StreamReader, front: Front) -> None:
        frames = FrameReader(is_engine=True)
        while data := await reader.read(_READ_BYTES):
            for command in frames.feed(data):
                if isinstance(command, Dismiss):
                    raise JoinRefused(command.reason) if command.is_refusal else _Dismissed(command.reason)
                if isinstance(command, Shutdown):  # a front ends its own connection, not an engine that others use
                    return
                if isinstance(command, _COMMANDS):
                    self._port.put(front, command)
                else:
                    raise PeerGone(f"the front sent {type(command).__name__}, which is not for an engine that joined")

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while not writer.transport.is_closing():
            writer.write(encode(self._alive()))
            await asyncio.sleep(ALIVE_S)


class _Dismissed(Exception):
    """The front needs this engine no more."""


def _tune(sock: socket.socket | None) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def require_addresses(text: str) -> list[_Address]:
    """HOST:PORT, several with commas between; ConfigError if that is not what it is."""
    found = [parse_address(part, "join") for part in text.split(",") if part.strip()]
    if not found or not all(port and _is_name(host) for host, port in found):
        raise ConfigError(f"join is {text!r}; allowed: HOST:PORT of a front, several with commas between")
    return list(dict.fromkeys(found))


def _is_name(host: str) -> bool:
    """Whether it may be looked up: an empty label, as in a..b, raises where it is."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
