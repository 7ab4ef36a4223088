"""How blocks cross between two engines: shared memory on one machine, TCP or TLS between two.

    shared memory   the serving engine copies a block into memory of its own that the other one may read, and sends its
                    header; the other copies it out and says so. Headers and requests go over a unix socket
    TCP, TLS        header and block follow one another; they are received straight into their place
    NIXL            as shared memory, but that the receiver reads it by NIXL (`nixl_link`)

A link lives from one handshake (`dialing`) to the end of its connection. What is sent or received has a limit of time
that a peer cannot lengthen by sending a little now and then.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import ssl
import struct
import time
from typing import Protocol

from headway.engine.tier.record import HEADER_BYTES, BlockHeader, unpack_header
from headway.errors import EngineError

SLOTS = 32  # blocks of shared memory
_BATCH = 8  # so many are announced, and given back, with one word: waking the other end takes as long as three copies
_ARENA = struct.Struct("<II")


class LinkBroken(EngineError):
    """The other end is gone, is not who it should be, or says what makes no sense."""


class BlockLink(Protocol):
    """One connection; a block has `block_bytes`."""

    sock: socket.socket

    def limit(self, seconds: float, quiet_s: float = math.inf) -> None:
        """All from now on has so long together, and each wait for the peer `quiet_s`; LinkBroken after that."""

    def ask(self, fetch: bytes) -> None:
        """Send a request."""

    def hear(self, into: memoryview) -> None:
        """Fill this with what the peer sends: a request, or part of one."""

    def slot(self) -> memoryview:
        """Where the next block is to be written before it is sent; waits until the reader has taken earlier ones."""

    def send(self, header: bytes) -> None:
        """Send the block that was written to `slot`."""

    def finish(self, end: bytes) -> None:
        """Send the record that ends an answer; what the reader still says about its blocks is heard."""

    def receive(self, into: memoryview) -> BlockHeader | None:
        """The next record, its data copied; None: a record that ends the answer, which has no data."""

    def close(self) -> None:
        """Hang up; idempotent."""


def receive_exactly(sock: socket.socket, into: memoryview, until: float = math.inf, quiet_s: float = math.inf) -> None:
    """Fill the buffer; LinkBroken if the other end closes before, or it is not full at that time."""
    at = 0
    while at < len(into):
        if at:
            _still(sock, until, quiet_s)
        try:
            num = sock.recv_into(into[at:])
        except OSError as error:
            raise LinkBroken(f"the connection broke: {error}") from error
        if not num:
            raise LinkBroken("the peer has closed the connection")
        at += num


def send_all(sock: socket.socket, *parts: bytes | bytearray | memoryview, until: float = math.inf) -> None:
    """All of these, with as few calls as it takes; LinkBroken if they are not taken before that time."""
    views = [memoryview(part) for part in parts]
    is_tls, is_first = isinstance(sock, ssl.SSLSocket), True
    while views:
        if not is_first:
            _still(sock, until)
        is_first = False
        try:
            sent = sock.send(views[0]) if is_tls else sock.sendmsg(views)
        except OSError as error:
            raise LinkBroken(f"the connection broke: {error}") from error
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views:
            views[0] = views[0][sent:]


def _still(sock: socket.socket, until: float, quiet_s: float = math.inf) -> None:
    """What is left of the time is the time of the next call: little by little must not take for ever."""
    if until < math.inf:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise LinkBroken("the peer is too slow")
        sock.settimeout(min(left_s, quiet_s))


class _SocketLink:
    """What links have in common: a socket, and a limit of time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._until = self._quiet_s = math.inf

    def limit(self, seconds: float, quiet_s: float = math.inf) -> None:
        self.sock.settimeout(min(seconds, quiet_s))
        self._until = time.monotonic() + seconds
        self._quiet_s = quiet_s

    def ask(self, fetch: bytes) -> None:
        self._send(fetch)

    def hear(self, into: memoryview) -> None:
        receive_exactly(self.sock, into, self._until, self._quiet_s)

    def close(self) -> None:
        self.sock.close()

    def _send(self, *parts: bytes | bytearray | memoryview) -> None:
        send_all(self.sock, *parts, until=self._until)


class TcpLink(_SocketLink):
    """Blocks over the socket itself, which may speak TLS."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(block_bytes))
        self._header = memoryview(bytearray(HEADER_BYTES))

    def slot(self) -> memoryview:
        return self._buffer

    def send(self, header: bytes) -> None:
        self._send(header, self._buffer)

    def finish(self, end: bytes) -> None:
        self._send(end)

    def receive(self, into: memoryview) -> BlockHeader | None:
        num = 0 if self._is_tls else self._scatter(into)
        if num < HEADER_BYTES:
            self.hear(self._header[num:])
            num = HEADER_BYTES
        header = _sound(self._header)
        if not header.num_bytes:
            return None
        if header.num_bytes != len(into):
            raise LinkBroken(f"the peer sent a block of {header.num_bytes} bytes; a block here has {len(into)}")
        self.hear(into[num - HEADER_BYTES :])
        return header

    def _scatter(self, into: memoryview) -> int:
        """Mostly all of a record: one call, no copy."""
        _still(self.sock, self._until, self._quiet_s)
        try:
            num = self.sock.recvmsg_into((self._header, into))[0]
        except OSError as error:
            raise LinkBroken(f"the connection broke: {error}") from error
        if not num:
            raise LinkBroken("the peer has closed the connection")
        return num


class SlotLink(_SocketLink):
    """Blocks through SLOTS places in memory that the sender owns and the receiver reads; headers over the socket."""

    def __init__(self, sock: socket.socket, block_bytes: int, arena: mmap.mmap) -> None:
        super().__init__(sock)
        self._bytes = block_bytes
        self._arena = arena  # the sender's; at the other end what is seen of it
        self._view = memoryview(arena)
        self._num_sent = self._num_taken = 0
        self._headers = bytearray()  # to send, or received and not yet looked at

    def slot(self) -> memoryview:
        if self._num_sent - self._num_taken >= SLOTS:
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
            self._send(headers)

    def _hear(self, num_words: int) -> None:
        self.hear(memoryview(bytearray(num_words)))
        self._num_taken += num_words * _BATCH

    def send(self, header: bytes) -> None:
        self._num_sent += 1
        self._headers += header
        if len(self._headers) >= _BATCH * HEADER_BYTES:
            self._flush()

    def receive(self, into: memoryview) -> BlockHeader | None:
        while len(self._headers) < HEADER_BYTES:  # the sender says nothing but headers
            _still(self.sock, self._until, self._quiet_s)
            try:
                raw = self.sock.recv(SLOTS * HEADER_BYTES)
            except OSError as error:
                raise LinkBroken(f"the connection broke: {error}") from error
            if not raw:
                raise LinkBroken("the peer has closed the connection")
            self._headers += raw
        self._bring(self._headers)
        header = _sound(self._headers[:HEADER_BYTES])
        del self._headers[:HEADER_BYTES]
        if not header.num_bytes:
            return None
        if header.num_bytes != self._bytes:
            raise LinkBroken(f"the peer sent a block of {header.num_bytes} bytes; a block here has {self._bytes}")
        into[:] = self._place(self._num_taken)
        self._num_taken += 1
        if self._num_taken % _BATCH == 0:
            self._send(b"a")
        return header

    def _place(self, number: int) -> memoryview:
        start = number % SLOTS * self._bytes
        return self._view[start : start + self._bytes]

    def _bring(self, headers: bytearray) -> None:
        """Have the blocks of these headers in `_arena`: more than this, where the sender's memory cannot be mapped."""


class SharedLink(SlotLink):
    """Its memory is mapped by the receiver, for reading; it has come by a unix socket."""

    @staticmethod
    def offer(sock: socket.socket, block_bytes: int) -> SharedLink:
        """The sender's end: makes the memory and hands over a descriptor of it."""
        fd = os.memfd_create("headway-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SLOTS * block_bytes)
            arena = mmap.mmap(fd, SLOTS * block_bytes)
            socket.send_fds(sock, [_ARENA.pack(SLOTS, block_bytes)], [fd])
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
            if len(fds) != 1 or raw != _ARENA.pack(SLOTS, block_bytes):
                raise LinkBroken("the peer's blocks are of another size")
            if os.fstat(fds[0]).st_size < SLOTS * block_bytes:
                raise LinkBroken("the peer shares less memory than it says")
            arena = mmap.mmap(fds[0], SLOTS * block_bytes, prot=mmap.PROT_READ)
        finally:
            for fd in fds:
                os.close(fd)
        return SharedLink(sock, block_bytes, arena)


def _sound(raw: memoryview | bytearray) -> BlockHeader:
    header = unpack_header(raw)
    if header is None:
        raise LinkBroken("the peer sent a header that is not whole")
    return header
