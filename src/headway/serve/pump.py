"""From an engine's frame to the connections, in one callback and without a task per token.

    frame ─▶ streams take note ─▶ Generation.on_arrival ─▶ Pump, in the next turn of the event loop:
             each follower takes what has come ─▶ text ─▶ events ─▶ ResponseBody.write ─▶ transport

The turn between lets the rest of a frame come first, so that a stream gets one write for it. A follower's own task
sleeps until the follower is done. This file knows neither text nor events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_STARTS = tuple(b"%x\r\n" % num_bytes for num_bytes in range(1024))  # of chunks, by their length
CYCLE = "headway.cycle"  # of a scope: a weak reference to what uvicorn knows of its response; it refers to the scope


class ArrivalSource(Protocol):
    """Where things come that a follower takes."""

    on_arrival: Callable[[], None] | None


class Pump:
    """Those whose arrivals came in one turn of the event loop take them in the next one, in the same order."""

    def __init__(self) -> None:
        self.grown: list[_Follower] = []  # those of which something came, if there are any: `turn` is due

    async def follow(self, arrivals: ArrivalSource, take: Callable[[], bool]) -> None:
        """Call `take` now, and after whatever comes, until it returns True or raises."""
        follower = _Follower(self, take)
        arrivals.on_arrival = follower.note
        try:
            self._turn_of([follower])
            await follower.done
        finally:
            arrivals.on_arrival = None

    def turn(self) -> None:
        """All who have grown take what has come."""
        grown, self.grown = self.grown, []
        self._turn_of(grown)

    def _turn_of(self, grown: Sequence[_Follower]) -> None:
        for follower in grown:
            if follower.done.done():
                continue
            try:
                is_done = follower.take()
            except Exception as error:
                follower.done.set_exception(error)
            else:
                if is_done:
                    follower.done.set_result(None)


class _Follower:
    """Takes until `done`, which is cancelled with the task that waits for it; nothing is taken after that."""

    __slots__ = ("_pump", "done", "take")

    def __init__(self, pump: Pump, take: Callable[[], bool]) -> None:
        self._pump = pump
        self.take = take
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(self) -> None:
        """Something came."""
        pump = self._pump
        if not pump.grown:
            asyncio.get_running_loop().call_soon(pump.turn)
        pump.grown.append(self)


class ResponseBody:
    """Writes the body of a response whose head is out to its connection, past ASGI, in chunks of HTTP.

    Every write is a whole chunk, so that ASGI may go on and end the body. A client that is gone or reads too slowly is
    ASGI's concern: there is no room then.
    """

    @classmethod
    def of(cls, scope: Scope) -> ResponseBody | None:
        """The body of a response whose head is out; None: it is not in chunks, or the server is another than ours."""
        cycle: RequestResponseCycle | None = scope[CYCLE]() if CYCLE in scope else None
        return None if cycle is None or not cycle.chunked_encoding else cls(cycle)

    __slots__ = ("_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def has_room(self) -> bool:
        return not (self._flow.write_paused or self._transport.is_closing())

    def write_chunk(self, before: bytes, text: bytes, behind: bytes) -> None:
        """One chunk of three parts, while there is room: what nearly every token needs."""
        num_bytes = len(before) + len(text) + len(behind)
        start = _STARTS[num_bytes] if num_bytes < len(_STARTS) else b"%x\r\n" % num_bytes
        self._transport.write(b"".join((start, before, text, behind, b"\r\n")))

    def write(self, parts: Sequence[bytes]) -> None:
        """Parts that are not empty, each as one chunk, together."""
        data = b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])
        if not self._transport.is_closing():  # else its end is about to be told
            self._transport.write(data)
