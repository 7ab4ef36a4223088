"""Bounds on the part of HTTP that comes before any application: the size of a head, and the time it may take.

uvicorn leaves both open with its fast parser. Every violation gets an error object and a closed connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.serve.problem import Problem, new_name

MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def http_config(app: ASGIApp, *, log_level: str = "warning", close_s: int = 1) -> uvicorn.Config:
    """How every server here speaks HTTP; connections get `close_s` seconds to close when it ends."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=close_s,
    )


class BoundedProtocol(HttpToolsProtocol):
    """One connection; between requests nothing is counted and uvicorn's keep-alive timeout rules."""

    head_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0
        self._num_headers = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes, self._num_headers = True, 0, 0
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self._too_slow)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        # Headers beyond the bounds are not kept; the request is refused once its head is complete.
        if not self._is_head_too_large():
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if self._is_head_too_large():
            # The parser turns it into its own error, and that into send_400_response.
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """The bytes are no HTTP, or more of it than we take."""
        if self._is_head_too_large():
            self._refuse(_too_large())
        else:
            self._refuse(Problem(400, "this is not a valid HTTP request", code="invalid_http"))

    def _is_head_too_large(self) -> bool:
        return self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES or len(self.url) > MAX_HEAD_BYTES

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(Problem(408, f"no complete request came for {self.head_s:g} s", code="head_timeout"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, problem: Problem) -> None:
        if self.transport.is_closing():
            return
        body = problem.body()
        head = (
            f"HTTP/1.1 {problem.status} {_REASONS[problem.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: req-{new_name()}\r\nx-should-retry: false\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _too_large() -> Problem:
    allowed = f"{MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes"
    return Problem(431, f"the head of the request is too large; allowed: {allowed}", code="head_too_large")
