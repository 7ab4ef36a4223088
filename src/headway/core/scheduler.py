"""The scheduler: who runs in the next step, and what came of an earlier one.

There are no phases. A request has known tokens and computed cells; the difference is what it still wants. A
prefill chunk, a decode step, a resume after preemption and a verified draft are one row with another count.

    schedule(now):  ends foreseen -> blocks for decode rows -> running chunks -> admissions -> plan
    commit(plan):   tokens to their requests -> full blocks published -> failures, stops, lengths

`schedule` costs O(joins + leaves + block crossings + chunks), `commit` one append per decode row besides. Several
plans may be in flight: a row whose last token is in flight is not planned again and its seat and blocks are given
on at once, since plans run in order; whatever a request gives up early is void in the plans in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.events import Admitted, EventSink, FirstToken, Stepped
from headway.core.flight import Deltas, Flight
from headway.core.ledger import KVLedger
from headway.core.lifecycle import Lifecycle
from headway.core.plan import Chunk, Grow, Join, Samples, StepPlan, StepResult, TokenLogprob
from headway.core.policy import Gate, Key, Pacer, Policy
from headway.core.request import Finish, Request, State


@dataclass(frozen=True, slots=True)
class Limits:
    """What one plan may hold. Every running row advances in every step, so tokens >= rows."""

    rows: int
    tokens: int
    chunk: int | None = None  # longest chunk of one row
    spare: int = 0  # blocks an admission must leave free while others run
    swaps: bool = False  # preempt by swapping to host memory where there is room, instead of recomputing

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= self.tokens
        assert self.chunk is None or self.chunk >= 1


class Scheduler:
    """Pure: equal calls give equal plans. No plan exceeds `Limits`; a row placed in it is no victim of it."""

    def __init__(
        self,
        ledger: KVLedger,
        limits: Limits,
        policy: Policy,
        *,
        sink: EventSink | None = None,
        pacer: Pacer | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.ledger = ledger
        self.limits = limits
        self.life = Lifecycle(ledger, limits.rows, policy, sink, limits.swaps)
        self.rows = self.life.rows
        self.line = self.life.line
        self._policy = policy
        self._pacer = pacer
        self._gate = gate
        self._counts_tokens = type(policy).on_tokens is not Policy.on_tokens
        self._turn = 0  # counts chunks, to give the oldest its share
        self._placed: set[int] = set()  # rows that this plan gives something to
        self._joins: list[Join] = []
        self._grows: list[Grow] = []
        self._chunks: list[tuple[Chunk, Request]] = []

    def add(self, req: Request, lease_s: float = 30.0) -> None:
        """Take a request. Raises RequestError if it can never fit; a LOADING one waits `lease_s` for its KV."""
        self.life.add(req, lease_s)

    def loaded(self, id: int, num_cells: int) -> None:
        """The KV of a loading request has arrived, for so many tokens; 0 says that it never will."""
        self.life.loaded(id, num_cells)

    def release(self, id: int) -> None:
        """A held request is not needed any more."""
        self.life.release(id)

    def abort(self, id: int, reason: Finish = Finish.ABORT) -> Request | None:
        """End a request at once, wherever it is; returns it, or None if there was nothing to end."""
        req = self.life.live.get(id)
        if req is None or req.state is State.HELD:
            self.life.release(id)
            return None
        self.life.finish(req, reason)
        return self.life.finished.pop()

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call other than by abort."""
        finished, self.life.finished = self.life.finished, []
        return finished

    @property
    def num_waiting(self) -> int:
        return len(self.line)

    @property
    def num_running(self) -> int:
        return self.rows.num_running + len(self.life.ending)

    @property
    def has_work(self) -> bool:
        """True while schedule or commit can move something on, now or when a lease ends."""
        return bool(self.life.flights or len(self.line) or self.rows.num_running)

    # ---- schedule ------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute now."""
        self.life.expire(now)
        self.line.wake_due(self.life.step)
        self.rows.advance()
        self._placed.clear()
        self._leave_foreseen()
        self._continue_decode()
        room = self.limits.tokens - self.rows.num_decoding
        if self._pacer is not None:
            room = min(room, max(1, self._pacer.tokens(now, self.rows.num_decoding)))
        room = self._continue_filling(room)
        self._admit_waiting(room, now)
        if not self._chunks and not self.rows.num_decoding:
            return self._unstick(now)
        decode, ids, sinks = self.rows.columns()
        plan = StepPlan(
            id=self.life.step,
            decode=decode,
            chunks=[chunk for chunk, _ in self._chunks],
            joins=self._joins,
            leaves=self.life.leaves,
            grows=self._grows,
            copies=self.ledger.drain_copies(),
        )
        self.life.flights.append(Flight(plan, ids, sinks, self._chunks))
        self._joins, self._grows, self._chunks, self.life.leaves = [], [], [], []
        self.life.step += 1
        return plan

    def _leave_foreseen(self) -> None:
        last = self.life.step - 1
        for row in self.rows.ends.take(last):
            req = self._at(row)
            if req.computed < req.planned or req.lease_s is not None:
                self.rows.retire(row)  # its prompt is in flight too, or its blocks are to be held: commit ends it
                self.rows.ends.add(last, row)
            else:
                self.life.foresee(req)

    def _continue_decode(self) -> None:
        """Provide the cells that decode rows write in this step, at the expense of others if need be."""
        step, rows = self.life.step, self.rows
        due = rows.crossings.take(step)
        if len(due) > self.ledger.pool.available:
            due.sort(key=self._victim_order)
        for row in due:
            if not rows.is_decoding(row):  # has sampled its last token, or was preempted a moment ago
                continue
            cell = rows.cell(row, step)
            if self._make_room(self._at(row), cell, cell + 1):
                rows.next_crossing(row, step, cell)

    def _make_room(self, req: Request, start: int, end: int) -> bool:
        """Make cells writable, preempting others for it; False if the request itself had to go."""
        while (grows := self.ledger.ensure(req, start, end)) is None:
            rows = [row for row, other in enumerate(self.rows.req) if other is not None and row not in self._placed]
            victim = self._at(max(rows, key=self._victim_order))
            self.life.preempt(victim)
            if victim is req:
                return False
        self._grows += grows
        self._placed.add(req.row)
        return True

    def _victim_order(self, row: int) -> tuple[Key, int]:
        req = self._at(row)
        return self._policy.victim_key(req), req.id

    def _at(self, row: int) -> Request:
        req = self.rows.req[row]
        assert req is not None, f"row {row} is empty"
        return req

    def _left(self, row: int) -> int:
        """Known tokens not yet planned; 0 while a row waits for the result it needs."""
        req = self._at(row)
        return len(req.tokens) - req.planned

    def _continue_filling(self, room: int) -> int:
        """Chunks for rows with known tokens, shortest rest first, every fourth to the oldest; returns what is left."""
        order = sorted((row for row in self.rows.filling if self._left(row)), key=self._left)
        while order and room > 0:
            self._turn += 1
            row = order[0] if self._turn % 4 else min(order, key=self.rows.joined.__getitem__)
            order.remove(row)
            req = self.rows.req[row]
            if req is None:  # preempted for a row before it
                continue
            count = self._chunk_size(req, room)
            if self._make_room(req, req.planned, req.planned + count):
                self._add_chunk(req, count)
                room -= count
        return room

    def _chunk_size(self, req: Request, room: int) -> int:
        wanted = len(req.tokens) - req.planned
        if wanted == 1 and req.draft:
            return min(1 + len(req.draft), req.params.max_tokens - req.num_output, room)
        return min(wanted, room, self.limits.chunk or wanted)

    def _add_chunk(self, req: Request, count: int) -> None:
        start, end = req.planned, min(req.planned + count, len(req.tokens))
        drafts = req.draft[: start + count - end]
        samples = Samples.NONE if end < len(req.tokens) else Samples.ALL if drafts else Samples.TOKEN
        self._chunks.append((Chunk(req.row, start, count, samples, drafts=drafts), req))
        req.planned = end
        if samples:
            if not req.needs_feedback:
                self.rows.begin_decode(req, self.life.step)
            if req.num_output == 0:
                self._fork(req)

    def _fork(self, leader: Request) -> None:
        """Seat those who share this prompt: they sample from its last position and compute nothing."""
        for req in self.line.take_followers(leader.id):
            if not self._allowed(self.rows.num_free):
                self.line.push(req, None)
                continue
            self.ledger.fork(leader, req, leader.num_prompt)
            req.num_cached = leader.num_cached
            req.planned = req.num_prompt
            self._seat(req, is_forked=True)
            self._chunks.append((Chunk(req.row, req.planned, 0, Samples.TOKEN, source=leader.row), req))
            if not req.needs_feedback:
                self.rows.begin_decode(req, self.life.step)

    def _allowed(self, seats: int) -> int:
        if self._gate is not None:
            seats = min(seats, self._gate.seats(self.life.now, self.rows.num_running, len(self.line)))
        return seats

    def _admit_waiting(self, room: int, now: float) -> None:
        """Admit in the line's order while a seat is free and the KV fits."""
        step, seats = self.life.step, self._allowed(self.rows.num_free)
        while room > 0 and seats > 0 and self.rows.num_free and (req := self.line.peek()) is not None:
            if self._policy.doomed(req, now):
                self.life.finish(req, Finish.ERROR, "its deadline cannot be met any more")
                continue
            if self.line.wait_for_prefix(req, len(self.ledger.cached_blocks(req)), step):
                continue
            if not self.ledger.adopt(req, self.limits.spare if self.rows.num_running else 0):
                break
            self.line.pop()
            req.planned = req.computed
            if req.num_preempted == 0:
                req.num_cached = req.computed
            self._seat(req)
            for key in req.keys[req.published :]:
                self.ledger.index.expect(key, req.row)
            count = self._chunk_size(req, room)
            self._add_chunk(req, count)
            room -= count
            seats -= 1

    def _seat(self, req: Request, is_forked: bool = False) -> None:
        row = self.rows.seat(req, self.life.step)
        self.rows.filling[row] = None
        self._placed.add(row)
        req.move(State.RUNNING)
        tokens, table = tuple(req.tokens), tuple(req.table)
        self._joins.append(
            Join(row, req.id, req.epoch, tokens, req.num_prompt, table, req.planned, req.params, req.seed, req.stop_ids)
        )
        self.life.emit(Admitted(req.id, self.life.step, self.life.now, req.planned, req.num_preempted > 0, is_forked))

    def _unstick(self, now: float) -> StepPlan | None:
        """Nothing was planned. If nothing is in flight either, whoever waits must move or be told."""
        if self.life.flights or not len(self.line):
            return None
        head = self.line.peek()
        if head is None or self.life.leases or not self._allowed(1):
            return None  # a gate or a lease will open, or somebody ended just now
        loaded = [req for req in self.line.requests() if req.table and req is not head]
        if loaded:  # they hold KV that came from elsewhere; they can compute it anew
            for req in loaded:
                self.ledger.free(req)
        else:
            self.life.finish(head, Finish.ERROR, "the KV cache cannot hold this request")
        return self.schedule(now)

    # ---- commit --------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> Deltas:
        """Take a plan's result in: tokens to their requests, blocks to the cache, ends to `finished`."""
        flight = self.life.flights.popleft()
        assert flight.plan.id == plan.id == result.plan_id, "results must come in the order of their plans"
        ids, tokens = self._deliver(flight, result)
        if self._counts_tokens:
            self._charge(flight, ids)
        logprobs: dict[int, Sequence[TokenLogprob]] = {}
        for row, entries in result.logprobs.items():
            if row not in flight.void and row not in result.failed:
                logprobs[self._owner(flight, row).id] = entries
        for row, error in result.failed.items():
            if row not in flight.void:
                self.life.finish(self._owner(flight, row), Finish.ERROR, error)
        for row in result.stopped:
            if row not in flight.void and row not in result.failed:
                self.life.finish(self._owner(flight, row), Finish.STOP)
        for row in self.rows.ends.take(plan.id):
            self.life.finish(self._at(row), Finish.LENGTH)
        for req in flight.final:
            if req.id in self.life.ending:
                self.life.finish(req, Finish.LENGTH)
        self.life.emit(
            Stepped(
                step=plan.id,
                elapsed=result.elapsed,
                num_decode=len(plan.decode),
                num_chunks=len(plan.chunks),
                num_computed=plan.num_tokens,
                num_generated=len(tokens),
                num_copies=len(plan.copies),
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                num_free_blocks=self.ledger.pool.available,
            )
        )
        return Deltas(ids, tokens, self.take_finished(), logprobs)

    def _owner(self, flight: Flight, row: int) -> Request:
        return flight.ending.get(row) or self._at(row)

    def _deliver(self, flight: Flight, result: StepResult) -> tuple[Sequence[int], Sequence[int]]:
        """Append each token to its request; the ids and tokens that really arrived, as columns."""
        num_decode = len(flight.ids)
        ids, tokens = flight.ids, result.tokens[:num_decode]
        skip = flight.void.union(result.failed) if result.failed else flight.void
        if skip:
            kept = [i for i, row in enumerate(flight.plan.decode) if row not in skip]
            ids, tokens = [ids[i] for i in kept], [tokens[i] for i in kept]
            for i in kept:
                flight.sinks[i](result.tokens[i])
        else:
            for sink, token in zip(flight.sinks, tokens, strict=True):  # the hot loop: 0.05 us per row
                sink(token)
        if not flight.chunks:
            return ids, tokens
        ids, tokens, at = list(ids), list(tokens), num_decode
        for chunk, req in flight.chunks:
            count = result.counts.get(chunk.row, 1) if chunk.samples else 0
            if chunk.row not in skip:
                arrived = self._commit_chunk(chunk, req, result.tokens[at : at + count], flight.plan.id)
                ids += [req.id] * len(arrived)
                tokens += arrived
            at += count
        return ids, tokens

    def _commit_chunk(self, chunk: Chunk, req: Request, tokens: Sequence[int], step: int) -> Sequence[int]:
        """One chunk's outcome: cells are present, full blocks are shared, tokens arrive up to the length limit."""
        tokens = tokens[: req.params.max_tokens - req.num_output]
        req.computed = chunk.start + (len(tokens) if chunk.samples is Samples.ALL else chunk.count)
        self.life.publish(req)
        if not tokens:
            return tokens
        if req.num_output == 0:
            self.life.emit(FirstToken(req.id, step))
        req.tokens += tokens
        if req.needs_feedback:
            req.planned = req.computed
            req.draft = ()
            if chunk.drafts:
                self.ledger.trim(req, req.computed)
            if req.num_output >= req.params.max_tokens:
                self.rows.ends.add(step, req.row)
        return tokens

    def _charge(self, flight: Flight, ids: Sequence[int]) -> None:
        """Tell the policy what each tenant was given in this step."""
        service: dict[str, list[int]] = {}
        for chunk, req in flight.chunks:
            service.setdefault(req.tenant, [0, 0])[0] += chunk.count
        for id in ids:
            service.setdefault(self.life.live[id].tenant, [0, 0])[1] += 1
        for tenant, (num_in, num_out) in service.items():
            self._policy.on_tokens(tenant, num_in, num_out)
