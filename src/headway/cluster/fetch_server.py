"""The serving end of `fetch`: threads of an engine process that hand out blocks while the engine steps.

It asks the engine to hold what a peer wants, copies each block while the hold stands, and lets go. A peer that is slow,
gone, or not of this fleet costs a thread until a timeout and nothing else: until it has shown the key that is five
seconds, and few may be in that state at a time; then a request or an answer has a time too, however it dribbles.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Protocol

from headway.cluster.dialing import listen, serve_link
from headway.cluster.fetch import END, START_BYTES, Fetch, rest_bytes, unpack_fetch
from headway.cluster.fetch_config import THIS_MACHINE, FetchConfig
from headway.cluster.handshake import has_room_for
from headway.cluster.links import BlockLink, LinkBroken
from headway.engine.mover import MOST_LEASE_S, Hold
from headway.engine.tier.record import checksum, pack_header
from headway.errors import EngineDead

log = logging.getLogger(__name__)

MOST_PEERS = 64  # that have shown the key
_IDLE_S = 60.0  # a peer that asks for nothing for so long is hung up on; it hangs up before
_REQUEST_S = 5.0  # from the first byte of a request to its last
_RETRY_S = 0.1  # after a connection that could not be accepted


class HeldBlocks(Protocol):
    """What the server needs of a `BlockMover`."""

    def ask(self, keys: list[bytes], lease_s: float, timeout_s: float) -> Hold | None: ...

    def copy_out(self, hold: Hold, index: int, into: memoryview) -> bool: ...

    def done(self, hold: Hold) -> None: ...


class FetchServer:
    """Listens until `close`. `address` is where peers dial: over shared memory, and by what `config` says."""

    def __init__(
        self, blocks: HeldBlocks, identity: bytes, block_bytes: int, config: FetchConfig = THIS_MACHINE
    ) -> None:
        self._blocks = blocks
        self._identity = identity
        self._block_bytes = block_bytes
        self._config = config
        local = f"unix:headway-kv-{secrets.token_hex(16)}"
        self._listeners = [listen(local, config.key)]
        addresses = [local]
        if config.listen:
            self._listeners.append(listen(f"{config.kind}:{config.where}", config.key))
            addresses.append(config.shown(self._listeners[-1].getsockname()[1]))
        if config.is_clear:
            log.warning(
                "KV is fetched at %s without TLS: it crosses the network, and tells what prompts were", addresses[-1]
            )
        self.address = ",".join(addresses)
        self._unknown: Counter[str] = Counter()  # connections that have not shown the key, by host
        self._open: set[socket.socket] = set()
        self._num_peers = 0
        self._lock = threading.Lock()
        self._is_closing = False
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="headway-fetch", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closing:
            try:
                sock, address = listener.accept()
            except OSError as error:  # the peer has left, or there are no descriptors
                if not self._is_closing:
                    log.warning("cannot accept a connection of an engine that fetches KV: %s", error.strerror)
                    time.sleep(_RETRY_S)
                continue
            host = str(address[0]) if address else "here"
            with self._lock:
                is_let_in = has_room_for(self._unknown, host) and not self._is_closing
                if is_let_in:
                    self._unknown[host] += 1
                    self._open.add(sock)
            if is_let_in:
                threading.Thread(target=self._serve, args=(sock, host), name="headway-fetch-peer", daemon=True).start()
            else:
                log.warning("too many connections at once that did not show the key; one from %s is closed", host)
                sock.close()

    def _serve(self, sock: socket.socket, host: str) -> None:
        link: BlockLink | None = None
        try:
            link = self._let_in(sock, host)
            while link is not None:
                self._answer(link, self._receive(link))
        except (LinkBroken, EngineDead) as broken:
            level = logging.WARNING if link is None and host != "here" else logging.DEBUG
            log.log(level, "a connection from %s to fetch KV was dropped: %s", host, broken)
        except Exception:
            log.exception("serving KV to a peer failed")
        finally:
            with self._lock:
                self._open -= {sock} if link is None else {sock, link.sock}
                self._num_peers -= link is not None
            if link is not None:
                link.close()
            sock.close()

    def _let_in(self, sock: socket.socket, host: str) -> BlockLink | None:
        """A link, once the peer has shown the key; None: there are enough."""
        try:
            link = serve_link(sock, self._config, self._block_bytes)
        finally:
            with self._lock:
                self._unknown[host] -= 1
                if not self._unknown[host]:
                    del self._unknown[host]
        with self._lock:
            is_full = self._num_peers >= MOST_PEERS
            self._num_peers += not is_full
            self._open.discard(sock)
            self._open.add(link.sock)  # another one with TLS
        if is_full:
            log.warning("%d engines fetch KV here at once, the limit; one from %s is hung up on", MOST_PEERS, host)
            with self._lock:
                self._open.discard(link.sock)
            link.close()
            return None
        return link

    def _receive(self, link: BlockLink) -> Fetch:
        start = memoryview(bytearray(START_BYTES))
        link.limit(_IDLE_S)
        link.hear(start[:1])
        link.limit(_REQUEST_S)
        link.hear(start[1:])
        more = rest_bytes(start)
        if more is None:
            raise LinkBroken("the peer asked for something that is not a fetch")
        rest = memoryview(bytearray(more))
        link.hear(rest)
        fetch = unpack_fetch(bytes(start) + bytes(rest))
        if fetch is None:
            raise LinkBroken("the peer's request is not whole")
        return fetch

    def _answer(self, link: BlockLink, fetch: Fetch) -> None:
        """Send what is here of the leading keys, then the end."""
        lease_s = min(fetch.lease_s, MOST_LEASE_S)
        link.limit(max(0.1, lease_s))
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
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
