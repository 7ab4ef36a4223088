"""Where other engines may fetch an engine's KV, and how the two show who they are. Refuses to know sockets of links.

The rules are those of the gate: without a key nothing but this machine is listened to, without TLS a warning is given.
"""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass, field
from importlib.util import find_spec

from headway.cluster.handshake import certified, is_loopback, parse_address
from headway.errors import ConfigError, EngineError

_NIXL = "nixl:"


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """For one engine. Peers of its machine find it over shared memory in any case."""

    listen: str = ""
    """HOST:PORT for peers of other machines, nixl:HOST:PORT to have blocks cross by NIXL; empty: there is none."""
    shown_host: str = ""
    """What they dial, if it is not the host of `listen`."""
    key: bytes | None = None
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None
    has_siblings: bool = False
    """Other engines of the same server fetch here, if this one can move its blocks."""

    def __post_init__(self) -> None:
        if not self.listen:
            return
        if self.kind == "nixl" and self.server_tls is not None:
            raise ConfigError(
                f"kv_listen is {self.listen!r} and NIXL does not encrypt: leave out --kv-tls-cert, or nixl:"
            )
        if self.kind == "nixl" and find_spec("nixl") is None:
            raise ConfigError(
                f"kv_listen is {self.listen!r} and NIXL is not installed: pip install --no-deps nixl nixl-cu12, or "
                "leave out nixl:"
            )
        if self.key is None and not is_loopback(self._host):
            raise ConfigError(
                f"kv_listen is {self.listen!r}, which other machines reach, and there is no key: give one with "
                "--key-file, or listen on 127.0.0.1"
            )

    @property
    def is_clear(self) -> bool:
        """True if KV crosses a network as it is."""
        return bool(self.listen) and self.server_tls is None and not is_loopback(self._host)

    @property
    def where(self) -> str:
        """HOST:PORT of `listen`."""
        return self.listen.removeprefix(_NIXL)

    @property
    def _host(self) -> str:
        return parse_address(self.where, "kv_listen")[0]

    @property
    def kind(self) -> str:
        """How it is listened at."""
        if self.listen.startswith(_NIXL):
            return "nixl"
        return "tcp" if self.server_tls is None else "tls"

    def shown(self, port: int) -> str:
        """The address that peers of other machines are told."""
        host = self.shown_host or self._host
        return f"{self.kind}:[{host}]:{port}" if ":" in host else f"{self.kind}:{host}:{port}"


@dataclass(frozen=True, slots=True)
class ReplicaFetching:
    """What a server tells each of its own engines, through a pipe, since the key is among it."""

    listen: str = ""
    key: bytes | None = field(default=None, repr=False)
    cert: str | None = None
    cert_key: str | None = None

    def config(self) -> FetchConfig:
        tls = None if self.cert is None else certified(self.cert, self.cert_key, "--tls-cert and --tls-key")
        return FetchConfig(self.listen, "", self.key, tls, None, has_siblings=True)

    def pack(self) -> bytes:
        key = None if self.key is None else self.key.decode()  # text, as it was given
        return json.dumps([self.listen, key, self.cert, self.cert_key]).encode()

    @staticmethod
    def unpack(raw: bytes) -> FetchConfig:
        """Nothing: the server has no other engines."""
        if not raw:
            return THIS_MACHINE
        listen, key, cert, cert_key = json.loads(raw)
        return ReplicaFetching(listen, None if key is None else key.encode(), cert, cert_key).config()


THIS_MACHINE = FetchConfig()  # over shared memory alone


def own_host(front: tuple[str, int]) -> str:
    """By which address this machine dials another one; sends nothing. EngineError if that cannot be told yet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(*front, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"by which address this machine reaches the front at {front[0]} cannot be told: "
            f"{error.strerror or error}; give --kv-listen HOST:PORT"
        ) from None
