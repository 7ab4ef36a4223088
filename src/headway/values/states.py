"""The states of a request, the moves between them, the reasons for which it waits, and the ways it may end."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, StrEnum
from typing import NamedTuple


class State(StrEnum):
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


class WaitReason(IntEnum):
    """Of queued requests the reason is the head's: requests behind it wait for what it waits for."""

    SLOTS = 0  # every slot is taken
    TOKENS = 1  # the step's token budget is used up
    BLOCKS = 2  # too few KV blocks are free
    PACING = 3  # one more row would break the latency target
    BARRIER = 4  # static and dynamic batching: the batch has not ended, or is not full
    PREFIX = 5  # a running row computes its prefix; of a follower, also while its leader waits
    PAUSED = 6  # its row skips steps
    LOADING = 7  # its KV is on the way from elsewhere
    GRAMMAR = 8  # its grammar is being compiled


class Waited(NamedTuple):
    """How long a request has waited for one reason."""

    steps: int
    seconds: float


NOT_YET = Waited(0, 0.0)


class Moment(NamedTuple):
    """A step, when it began, and what queued requests had waited in all until then, by reason."""

    step: int
    now: float
    totals: Mapping[WaitReason, Waited]  # replaced and never changed: many requests share it

    def plus(self, reason: WaitReason | None, steps: int, seconds: float) -> Moment:
        """So much later, all of it spent waiting for this reason, if requests waited at all."""
        totals = self.totals
        if reason is not None:
            before = totals.get(reason, NOT_YET)
            totals = {**totals, reason: Waited(before.steps + steps, before.seconds + seconds)}
        return Moment(self.step + steps, self.now + seconds, totals)


class Finish(Enum):
    """Why a request ended; exactly one per request."""

    STOP = "stop"  # a stop token, or a stop string seen by the client side
    LENGTH = "length"
    ABORT = "abort"
    SHED = "shed"  # its purpose could not be served any more; nothing was computed for it
    ERROR = "error"
