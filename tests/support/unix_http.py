"""HTTP over a unix socket, for tests of the admin endpoint."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("admin", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, body: Any = None, *, url: str = "/config") -> tuple[int, Any]:
    """Status and decoded body; bytes are sent as they are."""
    connection = UnixConnection(path)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, url, data)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
