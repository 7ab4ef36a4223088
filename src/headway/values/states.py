"""The states of a request, the moves between them, and the ways it may end."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    WAITING = "waiting"  # in the queue, never admitted or preempted
    LOADING = "loading"  # its KV is on the way from elsewhere; outside the loop
    RUNNING = "running"  # owns a row
    HELD = "held"  # finished, its blocks kept for a peer until a lease ends
    DONE = "done"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.DONE}),
    State.LOADING: frozenset({State.WAITING, State.DONE}),
    State.RUNNING: frozenset({State.WAITING, State.HELD, State.DONE}),
    State.HELD: frozenset({State.DONE}),
    State.DONE: frozenset(),
}


class Finish(Enum):
    """Why a request ended; exactly one per request."""

    STOP = "stop"  # a stop token, or a stop string seen by the client side
    LENGTH = "length"
    ABORT = "abort"
    SHED = "shed"  # its purpose could not be served any more; nothing was computed for it
    ERROR = "error"
