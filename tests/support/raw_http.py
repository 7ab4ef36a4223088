"""HTTP by hand, for tests of what no library would send."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit


class _Reader:
    """Stands for the socket to `HTTPResponse`, and for its file: one for all responses, since it reads ahead."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = io.BufferedReader(socket.SocketIO(sock, "rb"))  # which does not keep the socket open

    def makefile(self, _mode: str) -> _Reader:
        return self

    def close(self) -> None:
        """A response closes what it was read from; the next one is there already."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Raw:
    """One connection, bytes as they are."""

    def __init__(self, url: str, timeout_s: float = 20, receive_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        self.sock = socket.socket(socket.AF_INET)
        self.sock.settimeout(timeout_s)
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.connect((parts.hostname, parts.port))
        self._reader = _Reader(self.sock)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response; interim ones are skipped."""
        response = http.client.HTTPResponse(cast("socket.socket", self._reader))
        response.begin()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        response.close()
        return response.status, headers, body

    def is_closed(self) -> bool:
        """Wait until the server has closed; False if it does not within the timeout."""
        try:
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


def head(path: str, length: int | None, *lines: str, method: str = "POST") -> bytes:
    size = [] if length is None else [f"content-length: {length}"]
    kind = ["content-type: application/json"] if method == "POST" else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *kind, *size, *lines, "", ""]).encode()


def call(
    url: str, method: str, path: str, body: object = None, timeout_s: float = 60, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Status, decoded body and headers; bytes are sent as they are."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, {"content-type": "application/json", **names} if data else names)
        response = connection.getresponse()
        raw = response.read()
        known = {name.lower(): value for name, value in response.getheaders()}
        return response.status, json.loads(raw) if "json" in known.get("content-type", "") else raw, known
    finally:
        connection.close()


class Probe:
    """Asks for a path again and again from a thread and keeps how long after the last one each answer came."""

    def __init__(self, url: str, path: str = "/health") -> None:
        self.times: list[float] = []
        self._url, self._path = url, path
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._is_over.is_set():
            status, _, _ = call(self._url, "GET", self._path)
            assert status == 200
            now = time.monotonic()
            self.times.append(now - before)
            before = now

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def wait_for(check: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)  # a tight loop would keep the interpreter from the server it waits for
