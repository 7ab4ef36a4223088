"""Bounds on the part of HTTP that comes before any application: the size of a head, and the time everything may take.

uvicorn leaves them open with its fast parser. Every violation gets an error object and a closed connection.

    head (10 s) ─▶ body (read_body) ─▶ answer ─▶ rest of the body (2 s) ─▶ keep-alive ─▶ head …
                                         └ unread for 30 s: the connection is dropped
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.request_limits import LIMITS
from headway.serve.connections import PROBES, ConnectionLimits, Standing
from headway.serve.problem import UNAVAILABLE, Problem, new_name
from headway.serve.pump import CYCLE

_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_PROBE_S = 2.0  # for the head of a request on a connection beyond the limits
_LOOK_S = (0.02, 0.05, 0.2, 1.0)  # after which a client that has closed its side is looked at; then every second
_WAKE_BYTES = 16 * 1024
_ASKED_TO_GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"


def http_config(
    app: ASGIApp,
    *,
    log_level: str = "warning",
    close_s: int = 1,
    connections: ConnectionLimits | None = None,
) -> uvicorn.Config:
    """How every server here speaks HTTP; connections get `close_s` seconds to close when it ends."""

    def protocol(*args: Any, **kwargs: Any) -> BoundedProtocol:
        return BoundedProtocol(*args, connection_limits=connections, **kwargs)

    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=close_s,
    )


class BoundedProtocol(HttpToolsProtocol):
    """One connection. While no request is being answered a timer runs that ends it: ours, or that of keep-alive."""

    head_s = LIMITS.head_s
    send_s = LIMITS.send_s
    linger_s = LIMITS.linger_s

    def __init__(self, *args: Any, connection_limits: ConnectionLimits | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = connection_limits
        self._standing: Standing | None = None  # None: not counted
        self._address = "-"
        self._is_in_head = True
        self._is_in_body = False
        self._head_bytes = 0
        self._num_headers = 0
        self._num_begun = 0  # requests
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self.url = b""
        self._upgraded: bytes | None = None  # the head of a request that asked for another protocol, without that

    # The connection.

    def count(self, client: tuple[str, int] | None) -> Standing:
        """A connection of this client was accepted; what it may do."""
        self._standing = Standing.FULL
        if self._limits is not None:
            self._address = client[0] if client else "-"
            self._standing = self._limits.opened(self._address)
        return self._standing

    def uncount(self) -> None:
        """The connection has ended."""
        if self._limits is not None and self._standing is not None:
            self._limits.closed(self._address, self._standing)
        self._standing = None

    @property
    def most_head_s(self) -> float:
        """Seconds that a head may take on this connection."""
        return self.head_s if self._standing is Standing.FULL else min(_PROBE_S, self.head_s)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._standing is None:
            self.count(self.client)
        if self._standing is Standing.NONE:
            transport.abort()
        else:
            self._start_timer(self.most_head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        for timer in (self._sending, self._looking):
            if timer is not None:
                timer.cancel()
        self.uncount()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its side: it has left, or it has said all it has to say and waits for the answer.

        Data sent to a client that has left is answered by a reset. Any client takes a "100 Continue" before its answer,
        and a comment within a stream of events, the only answers here that come in chunks.
        """
        is_waiting = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not is_waiting or self.scheme == "https" or self.transport.is_closing():
            return False
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            self.transport.write(_ASKED_TO_GO_ON)
        elif self.cycle.chunked_encoding:
            self.transport.write(_COMMENT)
        self._looking = self.loop.call_later(_LOOK_S[0], self._look, 1)
        return True

    def _look(self, count: int) -> None:
        if self.transport.is_closing():
            return
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(_LOOK_S[min(count, len(_LOOK_S) - 1)], self._look, count + 1)

    # What comes.

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        num_begun, was_in_head = self._num_begun, self._is_in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing():
            return
        if was_in_head and self._is_in_head and num_begun == self._num_begun:
            self._head_bytes += len(data)  # all of it belongs to one head, which has not ended
            if self._head_bytes > LIMITS.head_bytes:
                self._refuse(_too_large())
        if self._is_idle and self._timer is None and self.timeout_keep_alive_task is None:
            self._start_timer(self.head_s)  # bytes that begin no request, or the rest of a body that is not read

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes, self._num_headers = True, 0, 0
        self._num_begun += 1
        if self._timer is None:
            self._start_timer(self.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # behind the body: a client's proxy has not seen it, and nothing we use may come there
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        # Headers beyond the bounds are not kept; the request is refused once its head is complete.
        if not self._is_head_too_large():
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_head_too_large():
            # The parser turns it into its own error, and that into send_400_response.
            raise ValueError("the head is too large")
        if self.parser.should_upgrade():
            self._upgraded = self._head_without_upgrade()
            return
        self._stop_timer()
        self._is_in_body = True
        if self._standing is not Standing.FULL and self.url.partition(b"?")[0] not in PROBES:
            self._refuse(_too_many())
            return
        super().on_headers_complete()
        self.scope[CYCLE] = weakref.ref(self.cycle)  # type: ignore[literal-required]
        if self._standing is not Standing.FULL:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._upgraded is not None or self.transport.is_closing() or self.cycle.response_complete:
            return
        # As uvicorn does it, but the application is not woken for every few bytes: a dribble would keep it busy.
        self.cycle.body += body
        if len(self.cycle.body) >= _WAKE_BYTES:
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgraded is None and not self.transport.is_closing():
            self._is_in_body = False
            super().on_message_complete()
            if self._is_idle and self.timeout_keep_alive_task is None and not self.pipeline:
                self._stop_timer()
                self._keep_alive()

    def _head_without_upgrade(self) -> bytes:
        """The head again, as if it had not asked for another protocol: a server may ignore that, and ours do."""
        dropped = (b"upgrade", b"http2-settings", b"connection")
        lines = [name + b": " + value + b"\r\n" for name, value in self.headers if name not in dropped]
        method = self.parser.get_method()
        return b"".join([method, b" ", self.url, b" HTTP/1.1\r\n", *lines, b"\r\n"])

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        head, self._upgraded = self._upgraded, None
        if head is None or head.startswith(b"CONNECT "):
            self.send_400_response("")
            return
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    # What goes out.

    def send_400_response(self, msg: str) -> None:
        """The bytes are no HTTP, or more of it than we take."""
        if self._is_head_too_large():
            self._refuse(_too_large())
        else:
            self._refuse(Problem(400, "this is not a valid HTTP request", code="invalid_http"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_sending()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            # The rest of the body comes now or never: no other request can come before it.
            self._unset_keepalive_if_required()
            self._start_timer(self.linger_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None and not self.transport.get_write_buffer_size():
            self._sending.cancel()
            self._sending = None

    def _watch_sending(self) -> None:
        if self._sending is None:
            size = self.transport.get_write_buffer_size()
            self._sending = self.loop.call_later(self.send_s, self._look_at_sending, size)

    def _look_at_sending(self, size: int) -> None:
        """Nothing was read of what waits to be sent: closing would wait for the client, and so for ever."""
        self._sending = None
        left = self.transport.get_write_buffer_size()
        if left >= size:
            self.transport.abort()
        elif left:
            self._watch_sending()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered or parsed."""
        return not self._is_in_head and (self.cycle is None or self.cycle.response_complete)

    def _is_head_too_large(self) -> bool:
        is_long = self._head_bytes > LIMITS.head_bytes or len(self.url) > LIMITS.head_bytes
        return is_long or self._num_headers > LIMITS.headers

    def _keep_alive(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_timer(self, limit_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, self._too_slow, limit_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self, limit_s: float) -> None:
        self._timer = None
        if self._is_idle:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(Problem(408, f"no complete request came for {limit_s:g} s", code="head_timeout"))

    def _refuse(self, problem: Problem) -> None:
        if self.transport.is_closing():
            return
        body = problem.body()
        headers = {**problem.headers, "connection": "close"}
        if problem.status != 503:
            headers["x-should-retry"] = "false"
        head = (
            f"HTTP/1.1 {problem.status} {_REASONS[problem.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: req-{new_name()}\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"{head}\r\n".encode() + body)
        self.transport.close()


def _too_large() -> Problem:
    allowed = f"{LIMITS.headers} headers and {LIMITS.head_bytes} bytes"
    return Problem(431, f"the head of the request is too large; allowed: {allowed}", code="head_too_large")


def _too_many() -> Problem:
    message = "too many connections are open, in all or from this address; close some, or retry later"
    return Problem(503, message, type=UNAVAILABLE, code="too_many_connections", headers={"retry-after": "2"})
