"""The scheduler's state: which request is where, and what the phases share. Data; every decision is elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.builder import InFlightStep
from headway.core.memory import Ledger
from headway.core.policy import Gate, Pacer, Policy
from headway.core.request import Request
from headway.core.rows import Rows
from headway.core.waiting import WaitingQueue
from headway.values.events import Event, EventSink
from headway.values.limits import Limits
from headway.values.work import Costs, Work


@dataclass(slots=True, eq=False)
class SchedulerState:
    """A live request is in exactly one of `waiting`, `rows`, `leases` (loading, held) and `ending`."""

    limits: Limits
    policy: Policy
    ledger: Ledger
    rows: Rows
    waiting: WaitingQueue
    costs: Costs
    gate: Gate | None = None
    pacer: Pacer | None = None
    sink: EventSink | None = None
    live: dict[int, Request] = field(default_factory=dict)
    leases: dict[int, float] = field(default_factory=dict)  # id -> when its blocks are taken back
    received: dict[int, Request] = field(default_factory=dict)  # waiting requests that hold KV from elsewhere
    ending: dict[int, tuple[Request, int]] = field(default_factory=dict)  # left this row, last token in flight
    in_flight: deque[InFlightStep] = field(default_factory=deque)
    leaves: list[int] = field(default_factory=list)  # rows that the next plan gives up
    finished: list[Request] = field(default_factory=list)  # not yet reported
    step: int = 0  # number of the next plan
    now: float = 0.0  # as the last call said that was given a time
    ceiling_of: Callable[[Request], float] = lambda req: req.likely_output  # of requests without `ceiling`
    length_factor: float = 1.0  # of expected lengths, for PEAK admission; follows preemptions, see `preemption.settle`
    had_to_preempt: bool = False  # for memory, in this step
    has_no_victim: int = -1  # the last head for which no running request was preempted
    num_prefill_turns: int = 0  # chunks planned so far, to give the oldest prompt its share

    def emit(self, event: Event) -> None:
        if self.sink is not None:
            self.sink.emit(event)

    def at(self, row: int) -> Request:
        """The request of a row that is taken."""
        req = self.rows.req[row]
        assert req is not None, f"row {row} is empty"
        return req

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call; those of a static batch when all of it has, the preempted too."""
        ended, self.finished = self.finished, []
        if self.gate is None or not self.gate.is_barrier or not (self.num_running or self.waiting.num_preempted):
            return ended
        self.finished = [req for req in ended if req.epoch]  # the others never had a row
        return [req for req in ended if not req.epoch]

    @property
    def num_running(self) -> int:
        return self.rows.num_running + len(self.ending)

    @property
    def num_slots(self) -> int:
        """Free slots, as far as the limits give them out."""
        return max(0, min(self.rows.num_free, self.limits.rows - self.rows.num_running))

    @property
    def decode_work(self) -> Work:
        """What the rows that decode carry in the next step, those with it that wait for their results and have them."""
        starts = [req.num_scheduled for req in self.rows.wanting() if req.wants_next]
        return Work(decode=self.rows.num_decoding + len(starts), context=self.rows.context(self.step) + sum(starts))
