"""How blocks cross between two engines: shared memory on one machine, TCP between two.

    unix:PATH       the serving engine copies a block into memory of its own that the other one may read, and sends its
                    header; the other copies it out and says so. Headers and requests go over the unix socket
    tcp:HOST:PORT   header and block follow one another; they are received straight into their place

Both ends first show that they have the fleet's key, if there is one; without it tcp serves this machine alone.
"""

from __future__ import annotations

import hmac
import mmap
import os
import socket
import struct
from hashlib import sha256
from typing import Protocol

from headway.engine.tier.record import HEADER_BYTES, BlockHeader, unpack_header
from headway.errors import ConfigError, EngineError

HANDSHAKE_S = 5.0
_NONCE_BYTES = 32
_SLOTS = 32  # blocks of shared memory
_BATCH = 8  # so many are announced, and given back, with one word: waking the other end takes as long as three copies
_ARENA = struct.Struct("<II")


class LinkBroken(EngineError):
    """The other end is gone, is not who it should be, or says what makes no sense."""


class BlockLink(Protocol):
    """One connection; a block has `block_bytes`."""

    sock: socket.socket

    def ask(self, fetch: bytes) -> None:
        """Send a request."""

    def slot(self) -> memoryview:
        """Where the next block is to be written before it is sent; waits until the reader has taken earlier ones."""

    def send(self, header: bytes) -> None:
        """Send the block that was written to `slot`."""

    def finish(self, end: bytes) -> None:
        """Send the record that ends an answer; what the reader still says about its blocks is heard."""

    def receive(self, into: memoryview) -> BlockHeader | None:
        """The next record, its data copied; None: a record that ends the answer, which has no data."""


def receive_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fill the buffer; LinkBroken if the other end closes before."""
    at = 0
    while at < len(into):
        try:
            num = sock.recv_into(into[at:])
        except OSError as error:
            raise LinkBroken(f"the connection broke: {error}") from error
        if not num:
            raise LinkBroken("the peer has closed the connection")
        at += num


class TcpLink:
    """Blocks over the socket itself."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._buffer = memoryview(bytearray(block_bytes))
        self._header = memoryview(bytearray(HEADER_BYTES))

    def ask(self, fetch: bytes) -> None:
        send_all(self.sock, fetch)

    def slot(self) -> memoryview:
        return self._buffer

    def send(self, header: bytes) -> None:
        send_all(self.sock, header, self._buffer)

    def finish(self, end: bytes) -> None:
        send_all(self.sock, end)

    def receive(self, into: memoryview) -> BlockHeader | None:
        try:
            num = self.sock.recvmsg_into((self._header, into))[0]  # mostly all of it: one call, no copy
        except OSError as error:
            raise LinkBroken(f"the connection broke: {error}") from error
        if num < HEADER_BYTES:
            if not num:
                raise LinkBroken("the peer has closed the connection")
            receive_exactly(self.sock, self._header[num:])
            num = HEADER_BYTES
        header = _sound(self._header)
        if not header.num_bytes:
            return None
        if header.num_bytes != len(into):
            raise LinkBroken(f"the peer sent a block of {header.num_bytes} bytes; a block here has {len(into)}")
        receive_exactly(self.sock, into[num - HEADER_BYTES :])
        return header


class SharedLink:
    """Blocks through memory that the sender owns and the receiver maps for reading; headers over a unix socket."""

    def __init__(self, sock: socket.socket, block_bytes: int, arena: mmap.mmap) -> None:
        self.sock = sock
        self._bytes = block_bytes
        self._arena = arena
        self._view = memoryview(arena)
        self._num_sent = self._num_taken = 0
        self._headers = bytearray()  # to send, or received and not yet looked at

    def ask(self, fetch: bytes) -> None:
        send_all(self.sock, fetch)

    @staticmethod
    def offer(sock: socket.socket, block_bytes: int) -> SharedLink:
        """The sender's end: makes the memory and hands over a descriptor of it."""
        fd = os.memfd_create("headway-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _SLOTS * block_bytes)
            arena = mmap.mmap(fd, _SLOTS * block_bytes)
            socket.send_fds(sock, [_ARENA.pack(_SLOTS, block_bytes)], [fd])
        except OSError as error:
            raise LinkBroken(f"memory to share cannot be had: {error}") from error
        finally:
            os.close(fd)
        return SharedLink(sock, block_bytes, arena)

    @staticmethod
    def accept(sock: socket.socket, block_bytes: int) -> SharedLink:
        """The receiver's end: maps it for reading."""
        try:
            raw, fds, _, _ = socket.recv_fds(sock, _ARENA.size, 1)
        except OSError as error:
            raise LinkBroken(f"the connection broke: {error}") from error
        try:
            if len(fds) != 1 or raw != _ARENA.pack(_SLOTS, block_bytes):
                raise LinkBroken("the peer's blocks are of another size")
            if os.fstat(fds[0]).st_size < _SLOTS * block_bytes:
                raise LinkBroken("the peer shares less memory than it says")
            arena = mmap.mmap(fds[0], _SLOTS * block_bytes, prot=mmap.PROT_READ)
        finally:
            for fd in fds:
                os.close(fd)
        return SharedLink(sock, block_bytes, arena)

    def slot(self) -> memoryview:
        if self._num_sent - self._num_taken >= _SLOTS:
            self._flush()
            self._hear(1)
        return self._place(self._num_sent)

    def finish(self, end: bytes) -> None:
        self._headers += end
        self._flush()
        # Whatever the reader says next is a request: what it says about these blocks is not to be mistaken for one.
        self._hear((self._num_sent - self._num_taken) // _BATCH)

    def _flush(self) -> None:
        headers, self._headers = self._headers, bytearray()
        if headers:
            send_all(self.sock, headers)

    def _hear(self, num_words: int) -> None:
        receive_exactly(self.sock, memoryview(bytearray(num_words)))
        self._num_taken += num_words * _BATCH

    def send(self, header: bytes) -> None:
        self._num_sent += 1
        self._headers += header
        if len(self._headers) >= _BATCH * HEADER_BYTES:
            self._flush()

    def receive(self, into: memoryview) -> BlockHeader | None:
        while len(self._headers) < HEADER_BYTES:  # the sender says nothing but headers
            try:
                raw = self.sock.recv(_SLOTS * HEADER_BYTES)
            except OSError as error:
                raise LinkBroken(f"the connection broke: {error}") from error
            if not raw:
                raise LinkBroken("the peer has closed the connection")
            self._headers += raw
        header = _sound(self._headers[:HEADER_BYTES])
        del self._headers[:HEADER_BYTES]
        if not header.num_bytes:
            return None
        if header.num_bytes != self._bytes:
            raise LinkBroken(f"the peer sent a block of {header.num_bytes} bytes; a block here has {self._bytes}")
        into[:] = self._place(self._num_taken)
        self._num_taken += 1
        if self._num_taken % _BATCH == 0:
            send_all(self.sock, b"a")
        return header

    def _place(self, number: int) -> memoryview:
        start = number % _SLOTS * self._bytes
        return self._view[start : start + self._bytes]


def send_all(sock: socket.socket, *parts: bytes | bytearray | memoryview) -> None:
    """All of these, with as few calls as it takes."""
    views = [memoryview(part) for part in parts]
    try:
        while views:
            sent = sock.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]
    except OSError as error:
        raise LinkBroken(f"the connection broke: {error}") from error


def _sound(raw: memoryview | bytearray) -> BlockHeader:
    header = unpack_header(raw)
    if header is None:
        raise LinkBroken("the peer sent a header that is not whole")
    return header


# Who is there.


def prove(sock: socket.socket, key: bytes | None, *, is_server: bool) -> None:
    """Both ends show that they have the key, over nonces that both made; LinkBroken if the other does not."""
    ours = os.urandom(_NONCE_BYTES)
    send_all(sock, ours)
    theirs = memoryview(bytearray(_NONCE_BYTES))
    receive_exactly(sock, theirs)
    server, client = (ours, bytes(theirs)) if is_server else (bytes(theirs), ours)
    mine, others = (b"server", b"client") if is_server else (b"client", b"server")
    proof = hmac.digest(key or b"", b"headway kv\0" + mine + server + client, sha256)
    wanted = hmac.digest(key or b"", b"headway kv\0" + others + server + client, sha256)
    if is_server:  # the one that dials proves first
        _expect(sock, wanted)
        send_all(sock, proof)
    else:
        send_all(sock, proof)
        _expect(sock, wanted)


def _expect(sock: socket.socket, wanted: bytes) -> None:
    got = memoryview(bytearray(len(wanted)))
    receive_exactly(sock, got)
    if not hmac.compare_digest(bytes(got), wanted):
        raise LinkBroken("the peer does not have this fleet's key")


def listen(address: str, key: bytes | None) -> socket.socket:
    """A socket at an address of the two kinds; tcp to other machines only with a key."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(where)  # in a folder that only its owner may look into
    else:
        host, port = _host_port(address)
        if key is None and host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(f"KV is to be fetched at {address!r}, which other machines reach, and there is no key")
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.listen(64)
    return sock


def serve_link(sock: socket.socket, key: bytes | None, block_bytes: int) -> BlockLink:
    """The serving end of a connection that was accepted."""
    sock.settimeout(HANDSHAKE_S)
    prove(sock, key, is_server=True)
    if sock.family == socket.AF_UNIX:
        return SharedLink.offer(sock, block_bytes)
    return TcpLink(sock, block_bytes)


def dial(address: str, key: bytes | None, block_bytes: int) -> BlockLink:
    """The fetching end."""
    kind, _, where = address.partition(":")
    is_local = kind == "unix"
    target = where if is_local else _host_port(address)
    family = socket.AF_UNIX if is_local else socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.connect(target)
        prove(sock, key, is_server=False)
        return SharedLink.accept(sock, block_bytes) if is_local else TcpLink(sock, block_bytes)
    except OSError as error:
        sock.close()
        raise LinkBroken(f"nothing answers at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if not host or not port.isdigit():
        raise LinkBroken(f"{address!r} is no address; allowed: unix:PATH, tcp:HOST:PORT")
    return host.strip("[]"), int(port)
