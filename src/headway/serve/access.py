"""One log line per request, written when its response has ended: client, method, path, status, time, request id,
and of answers their tokens, times and how they ended.

Pure ASGI, around everything else. The query is left out, since keys get into queries; a client that left before its
response began has the status 499. Requests at fault make so many lines a second and no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.serve.tracing import Tracing

log = logging.getLogger(__name__)

_CLIENT_GONE = 499
ANSWERED = "headway.answered"  # of a scope: a function that returns what there is to log about the answers
_MAX_PATH_CHARS = 256
_REFUSED_BURST = 100.0  # lines of refused requests
_REFUSED_PER_S = 10.0


class RefusedLines:
    """Bounds the lines that requests at fault make: a burst, then so many a second. Says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = _REFUSED_BURST
        self._at = clock()
        self._num_left_out = 0

    def take(self, status: int) -> int | None:
        """None: leave the line of a response with this status out; else how many were left out before it."""
        now = self._clock()
        self._left = min(_REFUSED_BURST, self._left + (now - self._at) * _REFUSED_PER_S)
        self._at = now
        if 400 <= status < 500:
            if self._left < 1:
                self._num_left_out += 1
                return None
            self._left -= 1
        num_left_out, self._num_left_out = self._num_left_out, 0
        return num_left_out


class AccessLog:
    """Passes everything on unchanged."""

    def __init__(self, app: ASGIApp, tracing: Tracing | None = None) -> None:
        self._app = app
        self._tracing = tracing
        self._refused = RefusedLines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (log.isEnabledFor(logging.INFO) or self._tracing):
            await self._app(scope, receive, send)
            return
        begun, begun_ns = time.perf_counter(), time.time_ns()
        status, request_id = _CLIENT_GONE, "-"

        async def send_noted(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message.get("headers", ())).get(b"x-request-id", b"-").decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            fields = _fields(scope, status, 1e3 * (time.perf_counter() - begun), request_id)
            num_left_out = self._refused.take(status)
            if num_left_out:
                log.info("the lines of %d refused requests were left out", num_left_out)
            if num_left_out is not None:
                _log(fields)
                if self._tracing is not None:
                    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                    self._tracing.record(headers, fields, begun_ns, time.time_ns())


def _fields(scope: Scope, status: int, duration_ms: float, request_id: str) -> dict[str, object]:
    fields: dict[str, object] = {
        "client": (scope.get("client") or ("-",))[0],
        "method": scope["method"],
        # As it came, percent-encoded: the decoded path may hold line breaks.
        "path": scope.get("raw_path", b"").decode("latin-1")[:_MAX_PATH_CHARS],
        "status": status,
        "duration_ms": round(duration_ms, 1),
        "request_id": request_id,
    }
    told = scope.get(ANSWERED)
    return fields if told is None else fields | told()


def _log(fields: dict[str, object]) -> None:
    line = "{client} {method} {path} {status} {duration_ms} ms {request_id}".format(**fields)
    if "finish" in fields:
        line += " {prompt_tokens}+{completion_tokens} tokens {finish}".format(**fields)
    log.info("%s", line, extra={"fields": fields})
