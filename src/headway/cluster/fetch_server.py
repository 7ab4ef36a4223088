"""The serving end of `fetch`: threads of an engine process that hand out blocks while the engine steps.

It asks the engine to hold what a peer wants, copies each block while the hold stands, and lets go. A peer that is slow,
gone, or not of this fleet costs a thread until a timeout and nothing else.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from headway.cluster.fetch import END, START_BYTES, Fetch, rest_bytes, unpack_fetch
from headway.cluster.links import BlockLink, LinkBroken, listen, receive_exactly, serve_link
from headway.engine.mover import MOST_LEASE_S, Hold
from headway.engine.tier.record import checksum, pack_header
from headway.errors import EngineDead

log = logging.getLogger(__name__)

_MOST_PEERS = 64
_IDLE_S = 600.0  # a peer that asks for nothing for so long is hung up on


class HeldBlocks(Protocol):
    """What the server needs of a `BlockMover`."""

    def ask(self, keys: list[bytes], lease_s: float, timeout_s: float) -> Hold | None: ...

    def copy_out(self, hold: Hold, index: int, into: memoryview) -> bool: ...

    def done(self, hold: Hold) -> None: ...


class FetchServer:
    """Listens until `close`. `address` is where peers dial."""

    def __init__(
        self, blocks: HeldBlocks, identity: bytes, block_bytes: int, *, at: str = "unix:", key: bytes | None = None
    ) -> None:
        self._blocks = blocks
        self._identity = identity
        self._block_bytes = block_bytes
        self._key = key
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if at == "unix:":
            self._folder = tempfile.TemporaryDirectory(prefix="headway-")  # mode 0700
            at = f"unix:{Path(self._folder.name) / 'kv'}"
        self._listener = listen(at, key)
        self.address = at
        if at.startswith("tcp:"):
            host, _, _ = at.removeprefix("tcp:").rpartition(":")
            self.address = f"tcp:{host}:{self._listener.getsockname()[1]}"
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closing = False
        threading.Thread(target=self._accept, name="headway-fetch", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closing:
                    return
                continue
            with self._lock:
                is_full = len(self._peers) >= _MOST_PEERS or self._is_closing
                if not is_full:
                    self._peers.add(sock)
            if is_full:
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="headway-fetch-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            link = serve_link(sock, self._key, self._block_bytes)
            while True:
                sock.settimeout(_IDLE_S)
                self._answer(link, self._receive(sock))
        except (LinkBroken, EngineDead) as broken:
            log.debug("a peer that fetched KV is gone: %s", broken)
        except Exception:
            log.exception("serving KV to a peer failed")
        finally:
            with self._lock:
                self._peers.discard(sock)
            sock.close()

    def _receive(self, sock: socket.socket) -> Fetch:
        start = memoryview(bytearray(START_BYTES))
        receive_exactly(sock, start)
        more = rest_bytes(start)
        if more is None:
            raise LinkBroken("the peer asked for something that is not a fetch")
        rest = memoryview(bytearray(more))
        receive_exactly(sock, rest)
        fetch = unpack_fetch(bytes(start) + bytes(rest))
        if fetch is None:
            raise LinkBroken("the peer's request is not whole")
        return fetch

    def _answer(self, link: BlockLink, fetch: Fetch) -> None:
        """Send what is here of the leading keys, then the end."""
        lease_s = min(fetch.lease_s, MOST_LEASE_S)
        link.sock.settimeout(max(0.1, lease_s))
        hold = None
        if fetch.identity == self._identity:
            hold = self._blocks.ask(fetch.keys, lease_s, lease_s)
        if hold is not None:
            try:
                for at in range(len(hold.blocks)):
                    slot = link.slot()
                    if not self._blocks.copy_out(hold, at, slot):
                        break
                    link.send(pack_header(fetch.keys[at], self._block_bytes, checksum(slot)))
            finally:
                self._blocks.done(hold)
        link.finish(END)

    def close(self) -> None:
        """Hang up on all; idempotent."""
        self._is_closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._peers:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if self._folder is not None:
            self._folder.cleanup()
