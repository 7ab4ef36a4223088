"""From an engine's frame to the connections, in one callback and without a task per token.

    frame ─▶ streams take note ─▶ Generation.on_arrival ─▶ Pump, in the next turn of the event loop:
             each follower takes what has come ─▶ text ─▶ events ─▶ `sends` and `chunks`
             then all of these are written, one after the other ─▶ transports

The turn between lets the rest of a frame come first, so that a stream gets one write for it. Writes come last and
together, since each of them fills the processor's caches with the system's own: a front of thousands of streams spends
most of its time in them. A follower's own task sleeps until the follower is done. This file knows neither text nor
events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CYCLE = "headway.cycle"  # of a scope: a weak reference to what uvicorn knows of its response; it refers to the scope


class ArrivalSource(Protocol):
    """Where things come that a follower takes."""

    on_arrival: Callable[[], None] | None


class Pump:
    """Those whose arrivals came in one turn of the event loop take them in the next one, in the same order."""

    def __init__(self, on_turn: Callable[[], None] = lambda: None) -> None:
        self.grown: list[_Follower] = []  # those of which something came, if there are any: `turn` is due
        self.now = 0.0  # when the turn of now began: a clock for each token would cost as much as its journal
        self.sends: list[
            Callable[[bytes], None]
        ] = []  # `send` of a body for each of `chunks`: to be called in this turn
        self.chunks: list[bytes] = []
        self._on_turn = on_turn  # called after each

    async def follow(self, arrivals: ArrivalSource, take: Callable[[], bool]) -> None:
        """Call `take` now, and after whatever comes, until it returns True or raises."""
        follower = _Follower(self, take)
        arrivals.on_arrival = follower.note
        try:
            self._turn_of([follower])
            await follower.done
        finally:
            arrivals.on_arrival = None
            follower.take = _take_nothing

    def turn(self) -> None:
        """All who have grown take what has come."""
        grown, self.grown = self.grown, []
        self._turn_of(grown)

    def _turn_of(self, grown: Sequence[_Follower]) -> None:
        self.now = time.monotonic()
        for follower in grown:
            try:
                if follower.take():
                    follower.end(None)
            except Exception as error:
                follower.end(error)
        for send, chunk in zip(self.sends, self.chunks, strict=True):
            try:
                send(chunk)
            except RuntimeError:  # the connection is closed: its end is about to be told
                continue
        self.sends.clear()
        self.chunks.clear()
        self._on_turn()


def _take_nothing() -> bool:
    """Of a follower that is done."""
    return False


class _Follower:
    """Takes until `done`, which is cancelled with the task that waits for it; nothing is taken once that task knows."""

    __slots__ = ("_pump", "done", "take")

    def __init__(self, pump: Pump, take: Callable[[], bool]) -> None:
        self._pump = pump
        self.take = take
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception | None) -> None:
        """Nothing more is taken."""
        self.take = _take_nothing
        if self.done.done():  # cancelled, and its task has not had its turn
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def note(self) -> None:
        """Something came."""
        pump = self._pump
        if not pump.grown:
            asyncio.get_running_loop().call_soon(pump.turn)
        pump.grown.append(self)


class ChunkStarts(dict[int, bytes]):
    """What a chunk of HTTP begins with, by its length."""

    def __missing__(self, num_bytes: int) -> bytes:
        return self.setdefault(num_bytes, b"%x\r\n" % num_bytes)


class ResponseBody:
    """Writes the body of a response whose head is out to its connection, past ASGI, in chunks of HTTP.

    Every write is a whole chunk, so that ASGI may go on and end the body. A client that is gone or reads too slowly is
    ASGI's concern: there is no room then.
    """

    @classmethod
    def of(cls, scope: Scope, pump: Pump) -> ResponseBody | None:
        """The body of a response whose head is out; None: it is not in chunks, or the server is another than ours."""
        cycle: RequestResponseCycle | None = scope[CYCLE]() if CYCLE in scope else None
        return None if cycle is None or not cycle.chunked_encoding else cls(cycle, pump)

    __slots__ = ("_transport", "flow", "pump", "send")

    def __init__(self, cycle: RequestResponseCycle, pump: Pump) -> None:
        self.flow = cycle.flow
        self.pump = pump
        self.send = cycle.transport.write  # whole chunks; RuntimeError if the connection is closed
        self._transport = cycle.transport

    @property
    def has_room(self) -> bool:
        return not (self.flow.write_paused or self._transport.is_closing())

    def write(self, parts: Sequence[bytes]) -> None:
        """Parts that are not empty, each as one chunk, together."""
        self.pump.sends.append(self.send)
        self.pump.chunks.append(b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts]))
