"""A request's way through the house: in, seated, sent back, out. Decides nothing; keeps the books together.

Whatever ends or interrupts a request passes here, so that its row, its blocks, its place in the line and its
tokens in flight are always settled in one place.
"""

from __future__ import annotations

from collections import deque

from headway.core.flight import Flight
from headway.core.ledger import KVLedger
from headway.core.line import Line, Watch
from headway.core.policy import Policy
from headway.core.request import Request
from headway.core.rows import Rows
from headway.errors import RequestError
from headway.values.events import Event, EventSink, Finished, Preempted, Queued
from headway.values.states import Finish, State
from headway.values.work import Costs


class Lifecycle:
    """Each live request is in exactly one of waiting, loading, running, held; a finished one owns nothing."""

    def __init__(
        self,
        ledger: KVLedger,
        num_rows: int,
        policy: Policy,
        sink: EventSink | None,
        swaps: bool,
        costs: Costs | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.ledger = ledger
        self.rows = Rows(num_rows, ledger.block_size)
        self.line = Line(ledger, self.rows.req, policy, watch)
        self.live: dict[int, Request] = {}
        self.ending: dict[int, tuple[Request, int]] = {}  # left their row, last token in flight
        self.leases: dict[int, float] = {}  # loading and held requests: when their blocks are taken back
        self.received: dict[int, Request] = {}  # waiting requests that hold KV from elsewhere
        self.flights: deque[Flight] = deque()
        self.leaves: list[int] = []  # rows the next plan must give up
        self.finished: list[Request] = []
        self.step = 0
        self.now = 0.0  # as the last call said that was given a time
        self._policy = policy
        self._sink = sink
        self._swaps = swaps
        self._costs = costs or Costs()

    def emit(self, event: Event) -> None:
        if self._sink is not None:
            self._sink.emit(event)

    def add(self, req: Request, lease_s: float) -> None:
        """Take a request; one that can never fit is refused at once. A LOADING one waits outside for its KV."""
        ledger = self.ledger
        if not ledger.can_ever_hold(req):
            raise RequestError(
                f"prompt ({req.num_prompt}) plus max_tokens ({req.params.max_tokens}) needs more than the "
                f"{ledger.pool.num_blocks * ledger.block_size} tokens of the KV cache; "
                "ask for fewer tokens or give the server more KV memory",
                param="max_tokens",
                code="context_length_exceeded",
            )
        assert req.id not in self.live, f"request {req.id} is live already"
        self.live[req.id] = req
        self.emit(Queued(req.id, req.arrival, req.num_prompt))
        if req.state is State.LOADING:
            if ledger.receive(req):
                self.leases[req.id] = max(self.now, req.arrival) + lease_s  # an idle scheduler's `now` is old
                return
            req.move(State.WAITING)  # no room to receive: compute it here
        leader = None if req.parent is None else self.live.get(req.parent)
        if leader is not None and (leader.planned >= leader.num_prompt or leader.tokens != req.tokens):
            leader = None  # too late to share, or not the same prompt
        self.line.push(req, leader)

    def loaded(self, id: int, num_cells: int) -> None:
        """KV for the first `num_cells` tokens of a loading request has arrived; 0 says that it never will."""
        req = self.live.get(id)
        if req is None or req.state is not State.LOADING:
            return
        del self.leases[id]
        if num_cells == 0:
            self.ledger.free(req)
        else:
            req.computed = min(num_cells, req.num_prompt - 1)
            self.received[id] = req
        req.move(State.WAITING)
        self.line.push(req, None)

    def reclaim(self, but: Request) -> bool:
        """Free KV that a waiting request received, the last first; it is computed here then. False: there is none."""
        req = next((req for req in reversed(self.received.values()) if req is not but), None)
        if req is None:
            return False
        del self.received[req.id]
        self.ledger.free(req)
        return True

    def release(self, id: int) -> None:
        """The peer has what it wanted: a held request gives its blocks back."""
        req = self.live.get(id)
        if req is not None and req.state is State.HELD:
            del self.leases[id], self.live[id]
            self.ledger.free(req)
            req.move(State.DONE)

    def expire(self, now: float) -> None:
        """Take back what was lent for a time that is over."""
        self.now = now
        for id in [id for id, deadline in self.leases.items() if deadline <= now]:
            if self.live[id].state is State.HELD:
                self.release(id)
            else:
                self.loaded(id, 0)

    def foresee(self, req: Request) -> None:
        """Its last token is in flight: seat and blocks are given on, the token will still find its request."""
        row = req.row
        for flight in self.flights:  # all younger than its seat: its prompt is committed
            flight.ending[row] = req
        self.flights[-1].final.append(req)
        self.ending[req.id] = (req, row)
        req.computed = self.rows.cells_of(req)
        self._give_up(req)

    def preempt(self, req: Request, is_lack: bool = True, is_protected: bool = False) -> None:
        """Take a running request's row and blocks away; it loses no output and comes back before new ones."""
        req.lost = num_lost = req.computed = self.rows.cells_of(req)
        is_swapped = self._swaps and self._is_swap_cheaper(req) and self.ledger.swap_out(req)
        self._void(req)
        self._give_up(req, keeps_books=is_swapped)
        self._drop_followers(req.id)
        req.num_preempted += 1
        req.planned = req.computed
        req.draft = ()
        req.move(State.WAITING)
        self.line.resume(req, is_lack)
        self.emit(Preempted(req.id, self.step, self.now, num_lost, is_swapped, is_lack, is_protected))

    def _is_swap_cheaper(self, req: Request) -> bool:
        """By what steps have shown; a copy that was never seen counts as cheap, so that one will be.

        Computing that was never seen, since every prompt came while the model was cold, does not count as free.
        """
        copies = self._costs.copy(2 * self.ledger.blocks_for(req.computed))
        again = self._costs.prefill(req.computed)
        return not self._costs.is_ready or again <= 0.0 or copies <= again

    def finish(self, req: Request, reason: Finish, error: str | None = None) -> None:
        """End a request wherever it is; it shows up in `finished` once."""
        holds = req.lease_s is not None and reason in (Finish.STOP, Finish.LENGTH) and req.row >= 0
        self.received.pop(req.id, None)
        if req.state is State.WAITING:
            self.line.remove(req)
            self.ledger.free(req)
        elif req.state is State.LOADING:
            del self.leases[req.id]
            self.ledger.free(req)
        else:
            self._void(req)
            if req.row >= 0:
                req.computed = self.rows.cells_of(req)
                self._give_up(req, keeps_books=holds)
        self._drop_followers(req.id)
        req.finish, req.error = reason, error
        if holds:
            req.move(State.HELD)
            self.leases[req.id] = self.now + (req.lease_s or 0.0)
        else:
            req.move(State.DONE)
            del self.live[req.id]
        self.finished.append(req)
        self._policy.on_finish(req)
        counts = req.num_prompt, req.num_output, req.num_preempted, req.num_recomputed
        self.emit(Finished(req.id, self.now, reason.value, *counts))

    def publish(self, req: Request) -> None:
        """Share what was computed, and call those who waited for it."""
        for key in self.ledger.publish(req):
            self.line.published(key)

    def _drop_followers(self, leader: int) -> None:
        for req in self.line.take_followers(leader):
            self.line.push(req, None)

    def _void(self, req: Request) -> None:
        """Tokens in flight for this request reach nobody."""
        _, row = self.ending.pop(req.id, (req, req.row))
        for flight in self.flights:
            if flight.ending.get(row) is req or (req.row >= 0 and flight.plan.id >= self.rows.joined[row]):
                flight.void.add(row)

    def _give_up(self, req: Request, keeps_books: bool = False) -> None:
        """Leave the row, and the blocks unless the books must stay as they are; wake whom this concerns."""
        row, unsettled = req.row, req.keys[req.published :]
        if not keeps_books:
            self.ledger.free(req)
        for key in unsettled:
            self.ledger.index.settle(key, row)
            self.line.blocked.wake(key)
        self.leaves.append(row)
        self.rows.vacate(req)
