"""From an engine's frame to the connections, in one callback and without a task per token.

    frame ─▶ streams take note ─▶ Generation.on_arrival ─▶ Pump, in the next turn of the event loop:
             each follower takes what has come ─▶ text ─▶ events ─▶ ResponseBody.write ─▶ transport

The turn between lets the rest of a frame come first, so that a stream gets one write for it. A follower's own task
sleeps until the follower is done. This file knows neither text nor events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CYCLE = "headway.cycle"  # of a scope: a weak reference to what uvicorn knows of its response; it refers to the scope


class ArrivalSource(Protocol):
    """Where things come that a follower takes."""

    on_arrival: Callable[[], None] | None


class Pump:
    """Those whose arrivals came in one turn of the event loop take them in the next one, in the same order."""

    def __init__(self) -> None:
        self._grown: list[_Follower] = []

    async def follow(self, arrivals: ArrivalSource, take: Callable[[], bool]) -> None:
        """Call `take` now, and after whatever comes, until it returns True or raises."""
        follower = _Follower(take)
        arrivals.on_arrival = partial(self._note, follower)
        try:
            follower.turn()
            await follower.done
        finally:
            arrivals.on_arrival = None

    def _note(self, follower: _Follower) -> None:
        if not self._grown:
            asyncio.get_running_loop().call_soon(self._turn)
        self._grown.append(follower)

    def _turn(self) -> None:
        grown, self._grown = self._grown, []
        for follower in grown:
            follower.turn()


class _Follower:
    """Takes until `done`, which is cancelled with the task that waits for it; nothing is taken after that."""

    __slots__ = ("_take", "done")

    def __init__(self, take: Callable[[], bool]) -> None:
        self._take = take
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def turn(self) -> None:
        if self.done.done():
            return
        try:
            is_done = self._take()
        except Exception as error:
            self.done.set_exception(error)
        else:
            if is_done:
                self.done.set_result(None)


class ResponseBody:
    """Writes the body of a response whose head is out to its connection, past ASGI, in chunks of HTTP.

    Every write is a whole chunk, so that ASGI may go on and end the body. A client that is gone or reads too slowly is
    ASGI's concern: there is no room then.
    """

    @classmethod
    def of(cls, scope: Scope) -> ResponseBody | None:
        """The body of the response to a request; None if another server than ours runs the application."""
        cycle: RequestResponseCycle | None = scope[CYCLE]() if CYCLE in scope else None
        return None if cycle is None else cls(cycle)

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def has_room(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not self._flow.write_paused and not cycle.disconnected

    def write(self, parts: Sequence[bytes]) -> None:
        """Parts that are not empty, each as one chunk, together."""
        data = b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])
        if not self._transport.is_closing():  # else its end is about to be told
            self._transport.write(data)
