"""Server-sent events, and detection of clients that disconnect.

A stream's status is decided by its first event: whatever fails before it is an ordinary error response. After
that, a failure is one error event; either way the stream ends with [DONE] and never just stops.

What runs per token is neither a task nor a timer but one call of `EventWriter.take`, which `pump` makes: events go from
there to the connection. Only what a connection has no room for goes the way of other responses, through ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.serve.answer import Delta, ServedAnswer
from headway.serve.body import ClientGone
from headway.serve.formats import Format, Frame
from headway.serve.generate import Generation, PlainAnswer
from headway.serve.problem import problem_of
from headway.serve.pump import ChunkStarts, Pump, ResponseBody

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
SEND_TIMEOUT_S = 30.0
_STARTS = ChunkStarts()


def event(data: bytes) -> bytes:
    """One event; the data is JSON and so holds no line break."""
    return b"data: " + data + b"\n\n"


class Events:
    """All events of a stream, in order. It raises only before its first event; the last one is [DONE]."""

    def __init__(self, run: Generation, format: Format, *, has_usage: bool) -> None:
        self._run = run
        self._format = format
        self._has_usage = has_usage
        self._begun: set[int] = set()
        self._has_spoken = False
        self._is_over = False

    async def next(self, pump: Pump) -> bytes | None:
        """Wait for the next bytes to send; None after the last."""
        chunk = b""

        def take() -> bool:
            nonlocal chunk
            chunk = self._take()
            return bool(chunk)

        if self._is_over:
            return None
        await pump.follow(self._run, take)
        return chunk

    def write_to(self, body: ResponseBody) -> bool:
        """Write all there is, at once; True after the last event, or if there is no room."""
        if not body.has_room:
            return True
        chunks: list[bytes] = []
        while not self._is_over and (chunk := self._take()):
            chunks.append(chunk)
        if chunks:
            body.write(chunks)
        return self._is_over

    @property
    def run(self) -> Generation:
        return self._run

    def plain(self) -> tuple[PlainAnswer, Frame] | None:
        """Where text comes from and what is around it in its event, as long as nothing but text is expected."""
        if self._is_over or (answer := self._run.plain()) is None or (frame := self._format.plain(0)) is None:
            return None
        return answer, frame

    def _take(self) -> bytes:
        """The next bytes to send; none if nothing has come."""
        try:
            while (growth := self._run.take()) is not None:
                chunk = self._write(*growth)
                if chunk:
                    self._has_spoken = True
                    return chunk
            if self._run.num_open:
                return b""
            self._is_over = True
            usage = event(self._format.usage(self._run.usage(), self._run.report())) if self._has_usage else b""
            return usage + DONE
        except Exception as error:
            self._is_over = True
            if not self._has_spoken:
                raise
            return event(problem_of(error).body()) + DONE

    def _write(self, answer: ServedAnswer, delta: Delta) -> bytes:
        index = answer.index
        opening = None
        if index not in self._begun:
            self._begun.add(index)
            opening = self._format.opening(index)  # before the chunk: the first one written carries the warnings
        is_something = bool(delta.text or delta.reasoning or delta.entries or delta.calls or delta.finish is not None)
        parts = delta.singly() if is_something else []
        chunk = b"".join([event(self._format.chunk(index, part)) for part in parts])
        return chunk if opening is None else event(opening) + chunk


class EventWriter:
    """Writes the events of a stream to a connection as they come; a token that is nothing but text in little time."""

    __slots__ = ("_before", "_behind", "_body", "_events", "_flow", "_num_around", "_plain", "_pump", "_send")

    def __init__(self, events: Events, body: ResponseBody) -> None:
        self._events = events
        self._body = body
        self._flow, self._pump, self._send = body.flow, body.pump, body.send
        self._plain: PlainAnswer | None = None
        self._before = self._behind = b""  # of a chunk, between its length and the text, and behind that
        self._num_around = 0  # bytes of its event that are not text
        self._arm()

    def take(self) -> bool:
        """Write all there is; True after the last event, or if there is no room."""
        plain = self._plain
        if plain is not None and not self._flow.write_paused and (text := plain.take()) is not None:
            if text:
                start, pump = _STARTS[self._num_around + len(text)], self._pump
                pump.sends.append(self._send)
                pump.chunks.append(b"".join((start, self._before, text, self._behind)))
            return False
        is_over = self._events.write_to(self._body)
        self._arm()
        return is_over

    def _arm(self) -> None:
        found = self._events.plain()
        self._plain = None if found is None else found[0]
        if found is not None and not self._before:
            self._before, behind = found[1].event()
            self._num_around, self._behind = len(self._before) + len(behind), behind + b"\r\n"


class EventStream(Response):
    """Sends events until they end, the client leaves or stops reading; then calls `on_close`, always."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: Events,
        pump: Pump,
        on_close: Callable[[], None],
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._pump = pump
        self._on_close = on_close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope, send))
        except ClientGone:
            pass
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = ResponseBody.of(scope, self._pump)
        chunk: bytes | None = self._first
        # A client that does not read blocks a send once the socket is full.
        with Patience(self._send_timeout_s) as patience:
            while chunk is not None:
                patience.begin()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                patience.end()
                if body is not None:
                    await self._pump.follow(self._rest.run, EventWriter(self._rest, body).take)
                chunk = await self._rest.next(self._pump)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Patience:
    """Ends the task that entered it, with ClientGone, once something it began takes longer than `limit_s`.

    One timer serves all that is begun: it looks after the limit, and again when the limit of what it then finds is
    over. Setting a timer for each would cost ten times as much as the two assignments.
    """

    def __init__(self, limit_s: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._limit_s = limit_s
        self._loop = loop or asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = None
        self._is_over = False
        self._timer = self._loop.call_later(limit_s, self._look)

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def __enter__(self) -> Patience:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._is_over and kind is asyncio.CancelledError:
            assert self._task is not None
            self._task.uncancel()
            raise ClientGone from None

    def _look(self) -> None:
        waited_s = 0.0 if self._since is None else self._loop.time() - self._since
        if waited_s >= self._limit_s:
            assert self._task is not None
            self._is_over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._limit_s - waited_s, self._look)


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
        # Cancelled work ends in its own time slice; its outcome is ignored.
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
