"""Error responses: one error shape, one table from our exceptions to HTTP.

Messages of expected errors are ours and go out as they are; anything unexpected is logged here and leaves as a
plain sentence, so that no address, path or traceback reaches a client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.errors import EngineDead, EngineError, EngineRestarting, Overloaded, RequestError, RowFailed
from headway.serve.openai import ErrorBody, ErrorResponse

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
LIMITED = "rate_limit_error"
_MAX_UNREAD_BYTES = 256 * 1024 * 1024
_UNREAD_S = 2.0
_MAX_MESSAGE_CHARS = 1024  # what clients sent may be quoted in it
_MAX_PARAM_CHARS = 128


class Problem(EngineError):
    """A failure that already knows how it looks over HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        is_body_unread: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.is_body_unread = is_body_unread

    def body(self) -> bytes:
        """The error object as JSON."""
        message, param = _cut(str(self), _MAX_MESSAGE_CHARS), self.param and _cut(self.param, _MAX_PARAM_CHARS)
        return msgspec.json.encode(ErrorResponse(ErrorBody(message, self.type, param, self.code)))

    def response(self) -> Response:
        kind = _Unread if self.is_body_unread else Response
        return kind(self.body(), self.status, self.headers, media_type="application/json")


class _Unread(Response):
    """Responds first, then reads and discards the rest of the body for a while.

    Closing a connection with unread data resets it, and many clients would see that instead of the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        num_left = _MAX_UNREAD_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNREAD_S):
                while num_left > 0:
                    message = await receive()
                    num_left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_STATUS = {"model_not_found": 404, "not_found": 404, "conflict": 409}  # of codes that are not a 400


def problem_of(error: Exception) -> Problem:
    """How an exception looks to a client."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError):
        status = _STATUS.get(error.code or "", 400)
        return Problem(status, str(error), param=error.param, code=error.code)
    if isinstance(error, Overloaded):
        wait_s = min(60.0, max(1.0, error.retry_after_s))
        # In milliseconds too, which clients prefer: whole seconds would bring all of them back at once.
        waits = {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(round(1e3 * wait_s))}
        return Problem(503, str(error), type=UNAVAILABLE, code="server_is_overloaded", headers=waits)
    if isinstance(error, EngineRestarting):
        return not_ready(str(error))
    if isinstance(error, EngineDead):
        message = "the engine is not running; the server has to be restarted"
        return Problem(503, message, type=UNAVAILABLE, code="engine_dead", headers={"retry-after": "5"})
    if isinstance(error, RowFailed):
        # The same request would most likely fail again: do not invite the client to repeat it.
        return Problem(500, str(error), type="server_error", headers={"x-should-retry": "false"})
    log.error("unexpected failure while answering a request", exc_info=error)
    # As with RowFailed: whatever broke broke on this request.
    closing = {"x-should-retry": "false"}
    return Problem(500, "the server failed while answering; its log says more", type="server_error", headers=closing)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def not_ready(message: str, wait_s: float = 2.0) -> Problem:
    """The server is starting or stopping, or its engine is: the client may retry soon, on a new connection."""
    wait = str(min(60, max(1, math.ceil(wait_s))))
    return Problem(
        503, message, type=UNAVAILABLE, code="not_ready", headers={"retry-after": wait, "connection": "close"}
    )


def interrupted(message: str) -> Problem:
    """The engine ended in the middle of this answer, which is not resumed; the client may ask again."""
    return Problem(503, message, type=UNAVAILABLE, code="engine_ended", headers={"retry-after": "2"})


def shed(message: str, wait_s: float) -> Problem:
    """The request was shed: its objective is infeasible and nothing was computed for it."""
    wait = str(min(60, max(1, math.ceil(wait_s))))
    return Problem(429, message, type=LIMITED, code="deadline_unreachable", headers={"retry-after": wait})


def new_name() -> str:
    """A random name for a request or a response: 128 bits, so that it cannot be guessed."""
    return secrets.token_hex(16)
