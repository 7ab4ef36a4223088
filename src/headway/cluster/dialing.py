"""How links between engines begin: where one listens, how another dials it, and that both have the fleet's key.

    unix:NAME       shared memory, on one machine and of one user; no file has the name, and it goes with its process
    tcp:HOST:PORT   between machines
    tls:HOST:PORT   likewise, encrypted; the certificate must be the host's
    nixl:HOST:PORT  between machines, blocks by NIXL if both ends have it

An engine that can be reached in several ways has several addresses with commas between, the best first; what it is
reached by is the first that answers. Without a key tcp, tls and nixl serve this machine alone.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from headway.cluster.fetch_config import FetchConfig
from headway.cluster.handshake import (
    HANDSHAKE_S,
    KV,
    HandshakeFailed,
    JoinRefused,
    Talk,
    admitting,
    greeting,
    is_loopback,
)
from headway.cluster.links import BlockLink, LinkBroken, SharedLink, TcpLink, receive_exactly, send_all
from headway.cluster.nixl_link import nixl_link
from headway.errors import ConfigError

_PEER = struct.Struct("3i")  # process, user, group


def listen(address: str, key: bytes | None) -> socket.socket:
    """A socket at one address; to other machines only with a key. ConfigError if it cannot be had."""
    kind, _, where = address.partition(":")
    try:
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(_abstract(where))
            sock.listen(64)
            return sock
        host, port = host_port(where)
        if key is None and not is_loopback(host):
            raise ConfigError(f"KV is to be fetched at {address!r}, which other machines reach, and there is no key")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(f"cannot listen for engines that fetch KV at {address}: {reason}; see --kv-listen") from None


def serve_link(sock: socket.socket, config: FetchConfig, block_bytes: int) -> BlockLink:
    """The serving end of a connection that was accepted: TLS, then the handshake, in a bounded time."""
    until = time.monotonic() + HANDSHAKE_S
    sock.settimeout(HANDSHAKE_S)
    is_local = sock.family == socket.AF_UNIX
    if is_local:
        _require_own(sock)
    if config.server_tls is not None and not is_local:
        try:
            sock = config.server_tls.wrap_socket(sock, server_side=True)
        except OSError as error:
            raise LinkBroken(f"the peer does not speak TLS as it should: {error}") from error
    try:
        _talk(sock, admitting(config.key, KV), until)
        if config.kind == "nixl" and not is_local:
            return nixl_link(sock, block_bytes, until, offers=True)
        return SharedLink.offer(sock, block_bytes) if is_local else TcpLink(sock, block_bytes)
    except BaseException:
        sock.close()  # a socket that TLS has taken over is not the caller's any more
        raise


def dial(addresses: str, config: FetchConfig, block_bytes: int) -> BlockLink:
    """The fetching end: a link to the first of these addresses that answers as it should."""
    broken = LinkBroken(f"{addresses!r} is no address")
    for address in addresses.split(","):
        try:
            return _dial(address, config, block_bytes)
        except LinkBroken as error:
            broken = error
    raise broken


def _dial(address: str, config: FetchConfig, block_bytes: int) -> BlockLink:
    kind, _, where = address.partition(":")
    until = time.monotonic() + HANDSHAKE_S
    sock: socket.socket | None = None
    try:
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(HANDSHAKE_S)
            sock.connect(_abstract(where))
            _require_own(sock)  # the name is free once its engine has ended
        elif kind in ("tcp", "tls", "nixl"):
            host, port = host_port(where)
            sock = socket.create_connection((host, port), HANDSHAKE_S)
            if kind == "tls":
                if config.client_tls is None:
                    raise LinkBroken(f"{address} speaks TLS; give --tls-ca, so that its certificate can be checked")
                sock = config.client_tls.wrap_socket(sock, server_hostname=host)
        else:
            raise LinkBroken(f"{address!r} is no address; allowed: unix:NAME; tcp:, tls: or nixl:HOST:PORT")
        _talk(sock, greeting(config.key, KV), until)
        if kind == "nixl":
            return nixl_link(sock, block_bytes, until, offers=False)
        return SharedLink.accept(sock, block_bytes) if kind == "unix" else TcpLink(sock, block_bytes)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise LinkBroken(f"nothing answers at {address} as it should: {error}") from error
    except BaseException:
        if sock is not None:
            sock.close()
        raise


def _talk(sock: socket.socket, talk: Talk, until: float) -> None:
    """One side of the handshake; LinkBroken if either end is not let in, or it takes too long."""
    got = None
    while True:
        try:
            said = next(talk) if got is None else talk.send(got)
        except StopIteration:
            return
        except (HandshakeFailed, JoinRefused) as failure:
            raise LinkBroken(str(failure)) from None
        if isinstance(said, bytes):
            send_all(sock, said, until=until)
            got = b""
        else:
            buffer = memoryview(bytearray(said))
            receive_exactly(sock, buffer, until)
            got = bytes(buffer)


def _abstract(name: str) -> str:
    """A name of Linux's own table. Any process may dial or take one, so that both ends look whose the other end is."""
    return "\0" + name


def _require_own(sock: socket.socket) -> None:
    """LinkBroken if the process at the other end of a unix socket belongs to another user."""
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise LinkBroken(f"the process at the other end belongs to user {user}, not to {os.geteuid()}")


def host_port(where: str) -> tuple[str, int]:
    """HOST:PORT, [IPV6]:PORT; LinkBroken if it is neither."""
    host, _, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise LinkBroken(f"{where!r} is no address; allowed: HOST:PORT")
    return host, int(port)
