"""Server-sent events, and watching whether the client is still there.

A stream's status is decided by its first event: whatever fails before it is an ordinary error response. After
that, a failure is one error event; either way the stream ends with [DONE] and never just stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.serve.body import ClientGone
from headway.serve.formats import Format
from headway.serve.generate import Run
from headway.serve.problem import problem_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
SEND_TIMEOUT_S = 30.0


def event(data: bytes) -> bytes:
    """One event; the data is JSON and so holds no line break."""
    return b"data: " + data + b"\n\n"


async def events(run: Run, format: Format, *, has_usage: bool) -> AsyncGenerator[bytes]:
    """Everything a stream says. Raises only before its first event."""
    begun: set[int] = set()
    has_spoken = False
    try:
        async with aclosing(run.deltas()) as deltas:
            async for answer, delta in deltas:
                chunks: list[bytes] = []
                if answer.index not in begun:
                    opening = format.opening(answer.index)
                    chunks += [] if opening is None else [event(opening)]
                    begun.add(answer.index)
                if delta.text or delta.entries or delta.finish is not None:
                    chunks.append(event(format.chunk(answer.index, delta)))
                if chunks:
                    has_spoken = True
                    yield b"".join(chunks)
        if has_usage:
            yield event(format.usage(run.usage()))
    except Exception as error:
        if not has_spoken:
            raise
        yield event(problem_of(error).body())
    yield DONE


class EventStream(Response):
    """Sends events until they end, the client leaves or stops reading; then calls `on_close`, always."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes],
        on_close: Callable[[], None],
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._on_close = on_close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._rest.aclose()
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send(send, self._first)
        async for chunk in self._rest:
            await self._send(send, chunk)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        # A client that does not read blocks here once the socket is full.
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientGone from None


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work unless the client leaves first; then it is cancelled and `ClientGone` raised."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
        # Cancelled work ends in its own time slice; its outcome is nobody's business any more.
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
