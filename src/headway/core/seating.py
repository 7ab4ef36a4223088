"""Who sits down and who gets up: seats and memory, given and taken.

    displace    somebody more urgent finds no seat: who must get up for it
    admit       those who are next take seats while memory lasts
    make_room   a running row needs a block and there is none: who gets up

A request that was preempted `Limits.preemptions` times is protected: it is no victim while an unprotected row runs, and
the most senior protected row yields to no other. It needs no reservation then: the others give way block by block. More
protected requests are admitted beside it while all of them fit into memory together at their likely lengths; one that
has to wait for that does not block the requests behind it. Where the estimate fails and only protected rows are left,
the youngest yields once more; from then on it is senior to those that have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.core.blocked import MOST_MOVES
from headway.core.flight import Draft
from headway.core.lifecycle import Lifecycle
from headway.core.policy import Gate, Key, Pacer, Policy
from headway.core.request import Request
from headway.values.events import Admitted
from headway.values.limits import Admission, Limits, Victims
from headway.values.plan import Join
from headway.values.states import Finish, State
from headway.values.work import Work

MOST_DISPLACED = 8  # in one step


class Seating:
    """Changes rows, line and ledger only through `Lifecycle`, and says in the draft what the executor must know."""

    def __init__(
        self, life: Lifecycle, limits: Limits, policy: Policy, gate: Gate | None, pacer: Pacer | None = None
    ) -> None:
        self.limits = limits
        self.gate = gate
        self.pacer = pacer
        self.stretch = 1.0  # of expected lengths; grows with preemptions that should not have been, see `settle`
        self.ceiling_of: Callable[[Request], float] = lambda req: req.likely_output  # of requests without `ceiling`
        self._life = life
        self._rows = life.rows
        self._line = life.line
        self._ledger = life.ledger
        self._policy = policy
        self._displaces = type(policy).displaces is not Policy.displaces
        self._had_to_preempt = False

    # ---- getting up ------------------------------------------------------------------------------------------

    def displace(self, now: float) -> None:
        """Let running requests get up for the next in line where the policy says so."""
        if not self._displaces:
            return
        for _ in range(MOST_DISPLACED):
            head = self.head(now)
            if head is None or not self.num_allowed(now, 1) or (self.num_seats and self.could_sit(head)):
                return
            victims = [req for req in self._rows.running() if not self.is_protected(req)]
            key = self._policy.displaced_key
            victim = max(victims, key=lambda req: self.victim_order(req, key(req)), default=None)
            if victim is None or not self._policy.displaces(head, victim, now):
                return
            self.preempt(victim, is_lack=False)

    def make_room(self, req: Request, start: int, end: int, draft: Draft) -> bool:
        """Make cells writable, preempting others for it; False if the request itself had to go."""
        while (grows := self._ledger.ensure(req, start, end)) is None:
            others = [other for other in self._rows.running() if other.row not in draft.placed]
            victim = max(others, key=self.victim_order)
            if victim is req and self._life.reclaim(req):
                continue
            if victim is req and self.is_protected(req) and draft.placed and not self._rows.is_decoding(req.row):
                return False  # a chunk can wait for the next step, when other rows may be victims
            self.preempt(victim, is_lack=True)
            self._had_to_preempt = True
            if victim is req:
                return False
        draft.grows += grows
        draft.placed.add(req.row)
        return True

    def preempt(self, victim: Request, is_lack: bool) -> None:
        """Take row and blocks away; a protected request waits apart from the others that were preempted."""
        self._life.preempt(victim, is_lack, self.is_protected(victim))
        if self.is_protected(victim):
            self._line.protect(victim)

    def is_protected(self, req: Request) -> bool:
        return req.num_preempted >= self.limits.preemptions

    def victim_order(self, req: Request, key: Key | None = None) -> tuple[bool, int, Key, float, int]:
        """The largest gets up first; of protected rows the youngest of the last class that never yielded."""
        if self.is_protected(req):
            return False, -req.num_preempted, (self._policy.rank(req),), req.arrival, req.id
        if key is None:
            key = self._policy.victim_key(req)
        if self.limits.victims is Victims.LAST_COME:
            worth = req.arrival
        else:
            worth = -float(self._ledger.num_alone(req, self._rows.cells_of(req)))
        return True, self._policy.rank(req), key, worth, req.id

    def settle(self) -> None:
        """After each step: one preemption for lack of memory in twenty steps is what `peak` aims at."""
        self.stretch = min(4.0, self.stretch * 1.05) if self._had_to_preempt else max(0.25, self.stretch * 0.9975)
        self._had_to_preempt = False

    # ---- sitting down ----------------------------------------------------------------------------------------

    @property
    def num_seats(self) -> int:
        """Free seats, as far as the limits give them out."""
        return max(0, min(self._rows.num_free, self.limits.rows - self._rows.num_running))

    def num_allowed(self, now: float, seats: int) -> int:
        """How many of these seats the gate gives out now."""
        if self.gate is None:
            return seats
        head = self.head(now)
        oldest = now if head is None else head.arrival
        return min(seats, self.gate.seats(now, self._rows.num_running, len(self._line), oldest))

    def admit(self, now: float, room: int, wanted: int, draft: Draft) -> None:
        """Seat those who are next. `wanted` tokens of those who sit are known and not planned, `room` fit this step."""
        seats, num_blocked = self.num_allowed(now, self.num_seats), 0
        while room > 0 and seats > 0 and self.num_seats > 0:
            if wanted >= room and len(self._rows.filling) >= self.limits.partial:
                break
            req = self._next(now)
            if req is None or self._must_wait(req):
                break
            if self._policy.doomed(req, now):
                self.shed(req)
            elif num_blocked < MOST_MOVES and self._line.block_head(req):
                num_blocked += 1
            elif num_blocked == MOST_MOVES or not self._adopt(req):
                break
            else:
                self._line.admit(req)
                self._sit_down(req, draft)
                wanted += len(req.tokens) - req.planned
                seats -= 1

    def head(self, now: float) -> Request | None:
        """The next in line: a protected request, unless it has to wait for other protected rows; else the others."""
        head, senior, rank = self._line.peek(now), self._line.protected.peek(now), self._policy.rank
        if senior is None or (head is not None and rank(head) < rank(senior)):
            return head
        rows = [row for row in self._rows.running() if self.is_protected(row)]
        return senior if not rows or self._fit_together((*rows, senior), 1.0) else head

    def _next(self, now: float) -> Request | None:
        """The next in line; where it finds no memory and the policy tries others, the first of those who do."""
        head, tries = self.head(now), self._policy.tries
        if head is None or tries == 1 or self._line.insists(head, now) or self.could_sit(head):
            return head
        return next((req for req in self._line.behind(tries, now) if self.could_sit(req)), head)

    def _must_wait(self, req: Request) -> bool:
        """True if those who run would suffer from one more."""
        if not self._rows.num_running:
            return False
        work = self._work(req)
        return self._policy.waits(req, work) or (self.pacer is not None and not self.pacer.has_seat(work))

    def shed(self, req: Request) -> None:
        self._life.finish(req, Finish.SHED, "its deadline could not be met any more; nothing was computed for it")

    def _work(self, req: Request) -> Work:
        """Of a step in which this request decodes too."""
        decode, context = self._rows.load(self._life.step)
        return Work(decode=decode + len(self._rows.filling) + 1, context=context + len(req.tokens))

    def _spare(self, req: Request) -> int:
        """Blocks that this admission must leave free."""
        if not self._rows.num_running:
            return 0
        return self.limits.spare + int(self._policy.leaves_free(req) * self._ledger.pool.num_blocks)

    def could_sit(self, req: Request) -> bool:
        """True if there is memory for it, should there be a seat."""
        return self._ledger.could_adopt(req, self._spare(req), self.reserves) and self._is_below_peak(req)

    def _adopt(self, req: Request) -> bool:
        return self._is_below_peak(req) and self._ledger.adopt(req, self._spare(req), self.reserves)

    @property
    def reserves(self) -> bool:
        """True if requests are never preempted for lack of memory: all they can ever need is set aside."""
        return self.limits.admission is Admission.RESERVE or not self.limits.preemptions

    def _is_below_peak(self, req: Request) -> bool:
        if self.limits.admission is not Admission.PEAK or not self._rows.num_running:
            return True
        return self._fit_together((*self._rows.running(), req), self.stretch)

    def _fit_together(self, requests: Iterable[Request], stretch: float) -> bool:
        """True if these will never need more memory than there is, should lengths come as expected."""
        capacity = self._ledger.pool.num_blocks * self._ledger.block_size
        most = sorted((self._to_come(req, stretch) for req in requests), reverse=True)
        held = peak = 0.0
        for count, (to_come, cells) in enumerate(most, 1):
            held += cells + self._ledger.block_size / 2
            peak = max(peak, to_come * count + held)
        return peak <= capacity

    def _to_come(self, req: Request, stretch: float) -> tuple[float, int]:
        """Cells it will probably still add, and those it has or is about to have.

        A quarter of what it has written at least: of lengths that vary widely, the longer the more is to come. Twice
        the likely length if it has yielded although it was protected.
        """
        stretch *= 1 + max(0, req.num_preempted - self.limits.preemptions)
        to_come = max(1.0, stretch * (req.ceiling or self.ceiling_of(req)) - req.num_output, req.num_output / 4)
        return min(to_come, float(req.params.max_tokens - req.num_output)), len(req.tokens)

    def _sit_down(self, req: Request, draft: Draft) -> None:
        req.planned = req.computed
        if req.num_preempted == 0:
            req.num_cached = req.computed
        else:
            req.num_recomputed += max(0, req.lost - req.computed)
        self.seat(req, draft)
        self._ledger.expect(req)

    def seat(self, req: Request, draft: Draft, is_forked: bool = False) -> None:
        """Give a row to a request whose table is made."""
        life, row = self._life, self._rows.seat(req, self._life.step)
        life.received.pop(req.id, None)
        self._rows.filling[row] = None
        draft.placed.add(row)
        req.move(State.RUNNING)
        tokens, table = tuple(req.tokens), tuple(req.table)
        draft.joins.append(
            Join(row, req.id, req.epoch, tokens, req.num_prompt, table, req.planned, req.params, req.seed, req.stop_ids)
        )
        self._policy.on_admit(req)
        life.emit(Admitted(req.id, life.step, life.now, req.planned, req.num_preempted > 0, is_forked))
