"""Where engines dial in: accepts a connection, has it prove who it is, and hands it to the fleet as a replica.

    accept ─▶ TLS ─▶ handshake ─▶ `Joining` ─▶ the fleet takes it, or says why not ─▶ messages until the connection ends

A peer that has not proved to have the key costs a descriptor for five seconds at most, and few of them are let wait at
a time; nothing that it sends is parsed beyond its fixed length. An engine whose frames do not decode, or make no sense,
loses its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from headway.cluster.handshake import (
    HANDSHAKE_S,
    HandshakeFailed,
    admit_engine,
    has_room_for,
    is_loopback,
    parse_address,
    read_key,
)
from headway.cluster.joined import JoinedEngine
from headway.engine.messages import Command, Dismiss, Joining, PeerGone
from headway.engine.wire import FrameReader, encode
from headway.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 0.25
_READ_BYTES = 256 * 1024
_RETRY_S = 0.1  # after a connection that could not be accepted
_LAST_WORDS_S = 1.0  # for the reason of a refusal to reach the engine


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Where engines dial in, and who may."""

    host: str
    port: int
    key: bytes | None = None
    tls: ssl.SSLContext | None = None
    cert: str | None = None
    """The file of TLS's certificate, and of its key, for engines of this server that others fetch KV from."""
    cert_key: str | None = None

    @staticmethod
    def of(address: str, key: str | None, key_file: str | None, tls: ssl.SSLContext | None) -> GateConfig:
        """From options; without a key only engines of this machine may dial in."""
        host, port = parse_address(address, "listen_engines")
        secret = read_key(key, key_file)
        if secret is None and not is_loopback(host):
            raise ConfigError(
                f"listen_engines is {address!r}, which other machines reach, and there is no key: give one with "
                "--engine-key-file, or listen on 127.0.0.1"
            )
        if secret is not None and tls is None and not is_loopback(host):
            log.warning("engines dial in at %s without TLS: prompts and answers cross the network in clear", address)
        return GateConfig(host, port, secret, tls)


class EngineFleet(Protocol):
    """Takes engines in."""

    def join(self, link: Link, join: Joining) -> JoinedEngine:
        """A replica from now on; ConfigError: it does not fit the others."""

    def look(self, passed_s: float) -> None:
        """So much time has passed: drop engines that stand still."""


class Link:
    """One connection to an engine, after the handshake."""

    def __init__(self, writer: asyncio.StreamWriter, where: str) -> None:
        self._writer = writer
        self.where = where

    @property
    def num_pending(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def send(self, command: Command) -> None:
        if not self._writer.transport.is_closing():
            self._writer.write(encode(command))

    def close(self) -> None:
        """End it after its last words; closed at once, unread bytes of the engine would make them be lost."""
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.abort)

    def abort(self) -> None:
        """End it now."""
        self._writer.transport.abort()


class EngineGate:
    """Listens from `open` to `close`; connections of engines end with it."""

    def __init__(self, config: GateConfig, fleet: EngineFleet) -> None:
        self._config = config
        self._fleet = fleet
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown: Counter[str] = Counter()  # by address
        self._links: set[Link] = set()

    @property
    def port(self) -> int:
        """Where it listens; of use if any free one was asked for."""
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def open(self) -> None:
        """Listen, in the running event loop; ConfigError if the address cannot be had."""
        config = self._config
        try:
            family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((config.host, config.port), family=family, backlog=128)
        except (OSError, UnicodeError) as error:  # the latter: a name with an empty label, as a..b
            reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
            raise ConfigError(
                f"cannot listen for engines on {config.host} port {config.port}: {reason}; choose another address with "
                "--listen-engines"
            ) from None
        self._listener.setblocking(False)
        log.info("engines may join at %s:%d", config.host, self.port)
        self._spawn(self._accept(self._listener))
        self._spawn(self._look())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links):
            link.abort()
        if self._listener is not None:
            self._listener.close()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            now = loop.time()
            self._fleet.look(min(now - last, 2 * LOOK_S))  # while this process was stopped, engines may have turned
            last = now

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # it has left already, or there are no descriptors
                log.warning("cannot accept an engine's connection: %s", error.strerror)
                await asyncio.sleep(_RETRY_S)
                continue
            host = str(address[0])
            if not has_room_for(self._unknown, host):
                log.warning("too many connections at once that did not prove who they are; one from %s is closed", host)
                sock.close()
                continue
            sock.setblocking(False)
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._unknown[host] += 1
            self._spawn(self._serve(sock, host, f"{host}:{address[1]}"))

    async def _serve(self, sock: socket.socket, host: str, where: str) -> None:
        """One connection from its first byte to its last."""
        writer: asyncio.StreamWriter | None = None
        try:
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    reader, writer = await self._streams(sock)
                    await admit_engine(reader, writer, self._config.key)
                    frames = FrameReader(is_engine=False)
                    join, more = await _first(reader, frames)
            finally:
                self._forget(host)
        except (OSError, EOFError, TimeoutError, HandshakeFailed, PeerGone) as error:
            why = (
                f"it did not prove who it is within {HANDSHAKE_S:g} s"
                if isinstance(error, TimeoutError)
                else str(error)
            )
            log.warning("a connection for engines from %s was dropped: %s", where, why or "it was closed")
            await _hang_up(sock, writer)
            return
        link = Link(writer, where)
        self._links.add(link)
        try:
            await self._run(link, reader, frames, join, more)
        finally:
            self._links.discard(link)
            writer.transport.abort()

    async def _run(
        self, link: Link, reader: asyncio.StreamReader, frames: FrameReader, join: Joining, more: Sequence[object]
    ) -> None:
        try:
            engine = self._fleet.join(link, join)
        except ConfigError as error:
            log.error("engine %s at %s was refused: %s", join.name, link.where, error)
            link.send(Dismiss(str(error), is_refusal=True))
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await reader.read()  # until it has read why, and closes
            return
        why, is_crash = "its connection closed", True
        try:
            values: Sequence[object] = more
            while True:
                for message in values:
                    engine.take_message(link, message)  # type: ignore[arg-type]
                data = await reader.read(_READ_BYTES)
                if not data:
                    break
                values = frames.feed(data)
        except asyncio.CancelledError:
            raise
        except OSError as error:
            why = f"its connection broke: {error}"
        except Exception as error:  # frames that do not decode, or make no sense: this engine is at fault
            why, is_crash = f"it sent what makes no sense: {error}", False
        engine.lost(link, why, is_crash=is_crash)

    async def _streams(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._config.tls)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _forget(self, host: str) -> None:
        self._unknown[host] -= 1
        if not self._unknown[host]:
            del self._unknown[host]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection for engines failed", exc_info=error)


async def _first(reader: asyncio.StreamReader, frames: FrameReader) -> tuple[Joining, list[object]]:
    """What an engine says of itself, and what came with it."""
    while True:
        data = await reader.read(_READ_BYTES)
        if not data:
            raise PeerGone("it closed the connection before it said what it is")
        values = frames.feed(data)
        joins = [at for at, value in enumerate(values) if isinstance(value, Joining)]
        if joins:
            return values[joins[0]], values[joins[0] + 1 :]
        # `Alive` may come first: another thread of the engine sends it.


async def _hang_up(sock: socket.socket, writer: asyncio.StreamWriter | None) -> None:
    """Close a connection, after what was said on it."""
    if writer is None:
        sock.close()
        return
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    writer.transport.abort()
