"""One log line per request, written when its response has ended: client, method, path, status, time, request id,
and of answers their tokens, times and how they ended.

Pure ASGI, around everything else. The query is left out, since keys get into queries; a client that left before its
response began has the status 499.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_CLIENT_GONE = 499
ANSWERED = "headway.answered"  # of a scope: a function that returns what there is to log about the answers
_MAX_PATH_CHARS = 256


class AccessLog:
    """Passes everything on unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
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
            fields: dict[str, object] = {
                "client": (scope.get("client") or ("-",))[0],
                "method": scope["method"],
                # As it came, percent-encoded: the decoded path may hold line breaks.
                "path": scope.get("raw_path", b"").decode("latin-1")[:_MAX_PATH_CHARS],
                "status": status,
                "duration_ms": round(1e3 * (time.perf_counter() - begun), 1),
                "request_id": request_id,
            }
            line = "{client} {method} {path} {status} {duration_ms} ms {request_id}".format(**fields)
            told = scope.get(ANSWERED)
            if told is not None and (said := told()):
                fields |= said
                line += " {prompt_tokens}+{completion_tokens} tokens {finish}".format(**said)
            log.info("%s", line, extra={"fields": fields})
