"""TLS in front of HTTP: a connection is counted when it is accepted, and its handshake has the time of a head.

A server that leaves TLS to its event loop hears of a connection when the handshake is over. Clients that never begin
one would be in no count, and could use up every descriptor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from headway.cluster.handshake import certified
from headway.serve.connections import Standing
from headway.serve.protocol import BoundedProtocol

log = logging.getLogger(__name__)

_RETRY_S = 0.1  # after a connection that could not be accepted


def tls_context(cert: str, key: str | None) -> ssl.SSLContext:
    """For these files, in PEM; the key may be in the certificate's file."""
    return certified(cert, key, "--tls-cert and --tls-key")


class TlsListener:
    """Accepts connections and does their handshakes; each has a protocol of its own, which counts it."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, make: Callable[[], BoundedProtocol]) -> None:
        listener.setblocking(False)
        self._listener, self._context, self._make = listener, context, make
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more; connections whose handshake is over stay."""
        self._accepting.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as error:  # the client has left, or there are no descriptors
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(_RETRY_S)
                continue
            protocol = self._make()
            if protocol.count(address) is Standing.NONE:
                sock.close()
                continue
            handshake = asyncio.create_task(self._shake_hands(sock, protocol))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket, protocol: BoundedProtocol) -> None:
        loop, limit_s = asyncio.get_running_loop(), protocol.most_head_s
        try:
            await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=limit_s)
        except (OSError, asyncio.CancelledError):  # no TLS, too slow, gone already, or the server ends
            protocol.uncount()
            sock.close()
