"""Blocks by NIXL: the sender's memory is registered, and the receiver reads it, over whatever network UCX finds.

Headers, requests and words about slots go over the socket, as with shared memory. Where NIXL is missing at one end the
link is one of TCP. The only file that imports NIXL, and only when a link is to use it; nothing depends on it.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.cluster.links import SLOTS, BlockLink, LinkBroken, SlotLink, TcpLink, receive_exactly, send_all
from headway.engine.tier.record import HEADER_BYTES, unpack_header

_OFFER = struct.Struct("<IIIQ")  # slots, bytes of a block, bytes of what NIXL has to know, where the memory lies
_MOST_METADATA = 1 << 20
_WAIT_S = 20e-6
_YES, _NO = b"y", b"n"


def find_nixl() -> Any | None:
    """NIXL's module, if it is installed and can be loaded."""
    try:
        from nixl import _api
    except Exception:  # not there, or without what it needs of the system
        return None
    return _api


def nixl_link(sock: socket.socket, block_bytes: int, until: float, *, offers: bool) -> BlockLink:
    """A link over a socket whose two ends know each other; `offers`: this end sends blocks."""
    api = find_nixl()
    send_all(sock, _NO if api is None else _YES, until=until)
    word = bytearray(1)
    receive_exactly(sock, memoryview(word), until)
    if api is None or word != _YES:
        return TcpLink(sock, block_bytes)
    with _or_broken("NIXL does not start"):
        agent = api.nixl_agent(secrets.token_hex(16), api.nixl_agent_config(backends=["UCX"]))
        arena = mmap.mmap(-1, SLOTS * block_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        agent.register_memory([(address, SLOTS * block_bytes, 0, "")], "DRAM")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = NixlLink(sock, block_bytes, arena, agent)
    if offers:
        metadata = bytes(agent.get_agent_metadata())
        send_all(sock, _OFFER.pack(SLOTS, block_bytes, len(metadata), address), metadata, until=until)
    else:
        link.accept(address, until)
    return link


@contextmanager
def _or_broken(what: str) -> Iterator[None]:
    """NIXL's errors have no class of their own that all of its versions share."""
    try:
        yield
    except LinkBroken:
        raise
    except Exception as error:
        raise LinkBroken(f"{what}: {error}") from error


class NixlLink(SlotLink):
    """One agent for each link: its end is the end of all that was registered."""

    def __init__(self, sock: socket.socket, block_bytes: int, arena: mmap.mmap, agent: Any) -> None:
        super().__init__(sock, block_bytes, arena)
        self._agent = agent
        self._here: Any = None  # the slots of this end and of the other one, prepared
        self._there: Any = None
        self._num_read = 0

    def accept(self, address: int, until: float) -> None:
        """The receiver's end: learn of the sender's memory."""
        raw = bytearray(_OFFER.size)
        receive_exactly(self.sock, memoryview(raw), until)
        num_slots, block_bytes, num_metadata, start = _OFFER.unpack(raw)
        if (num_slots, block_bytes) != (SLOTS, self._bytes) or num_metadata > _MOST_METADATA:
            raise LinkBroken("the peer's blocks are of another size")
        metadata = bytearray(num_metadata)
        receive_exactly(self.sock, memoryview(metadata), until)
        with _or_broken("NIXL cannot reach the peer"):
            name = self._agent.add_remote_agent(bytes(metadata))
            self._here = self._agent.prep_xfer_dlist("", self._slots(address), "DRAM")
            self._there = self._agent.prep_xfer_dlist(name, self._slots(start), "DRAM")

    def close(self) -> None:
        super().close()
        self._here = self._there = self._agent = None

    def _slots(self, start: int) -> list[tuple[int, int, int]]:
        return [(start + at * self._bytes, self._bytes, 0) for at in range(SLOTS)]

    def _bring(self, headers: bytearray) -> None:
        """Read all blocks that are announced at once: a wait for each would be most of the time."""
        num_announced = self._num_taken
        for at in range(0, len(headers) - HEADER_BYTES + 1, HEADER_BYTES):
            header = unpack_header(headers[at : at + HEADER_BYTES])
            num_announced += header is not None and header.num_bytes > 0
        if num_announced - self._num_taken > SLOTS:
            raise LinkBroken("the peer announces more blocks than it has slots")
        if num_announced > self._num_read:
            self._read([number % SLOTS for number in range(self._num_read, num_announced)])
            self._num_read = num_announced

    def _read(self, slots: list[int]) -> None:
        with _or_broken("NIXL could not read"):
            handle = self._agent.make_prepped_xfer("READ", self._here, slots, self._there, slots)
            state, until = self._agent.transfer(handle), min(self._until, time.monotonic() + self._quiet_s)
            while state == "PROC":
                if time.monotonic() > until:
                    raise LinkBroken("the peer is too slow")
                time.sleep(_WAIT_S)
                state = self._agent.check_xfer_state(handle)
            handle.release()
        if state != "DONE":
            raise LinkBroken("NIXL could not read a block of the peer")
