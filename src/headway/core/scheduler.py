"""The scheduler: who runs in the next step, and what came of an earlier one.

There are no phases. A request has known tokens and computed cells; the difference is what it still wants. A
prefill chunk, a decode step, a resume after preemption and a verified draft are one row with another count.

    schedule(now):  the hopeless shed -> ends foreseen -> seats for the urgent -> who sits out
                    -> blocks for decode rows -> admissions -> chunks -> plan
    commit(plan):   tokens to their requests -> full blocks published -> failures, stops, lengths

`schedule` costs O(joins + leaves + block crossings + chunks), `commit` one append per decode row besides. Several
plans may be in flight: a row whose last token is in flight is not planned again and its seat and blocks are given
on at once, since plans run in order; whatever a request gives up early is void in the plans in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.filling import Filling
from headway.core.flight import Deltas, Draft, Flight
from headway.core.ledger import KVLedger
from headway.core.lifecycle import Lifecycle
from headway.core.line import Watch
from headway.core.policy import Gate, Pacer, Policy, Tools
from headway.core.request import Account, Request
from headway.core.seating import Seating
from headway.values.events import EventSink, FirstToken, Stepped
from headway.values.limits import Limits
from headway.values.plan import Chunk, Samples, StepPlan, StepResult
from headway.values.states import Finish, State
from headway.values.work import Costs, Work, pairs_of


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
        costs: Costs | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.ledger = ledger
        self.costs = costs or Costs()
        policy.attach(Tools(self.costs, self.num_cached, lambda req: self.rows.cells_of(req), ledger.block_size))
        self.life = Lifecycle(ledger, limits.rows, policy, sink, limits.swaps, self.costs, watch)
        self.rows = self.life.rows
        self.line = self.life.line
        self.seating = Seating(self.life, limits, policy, gate, pacer)
        self.filling = Filling(self.life, self.seating, policy)
        self.policy = policy
        self._counts_tokens = type(policy).on_tokens is not Policy.on_tokens
        self._draft = Draft()

    def reconfigure(self, limits: Limits) -> None:
        """Other limits from the next plan on; seats beyond those it was made with do not exist."""
        assert limits.rows <= len(self.rows.req)
        self.seating.limits = limits

    def num_cached(self, req: Request) -> int:
        """Prompt tokens that the cache has now."""
        return len(self.ledger.cached_blocks(req)) * self.ledger.block_size

    def add(self, req: Request, lease_s: float = 30.0) -> None:
        """Take a request. Raises RequestError if it can never fit; a LOADING one waits `lease_s` for its KV."""
        self.life.add(req, lease_s)

    def loaded(self, id: int, num_cells: int) -> None:
        """The KV of a loading request has arrived, for so many tokens; 0 says that it never will."""
        self.life.loaded(id, num_cells)

    def release(self, id: int) -> None:
        """A held request is not needed any more."""
        self.life.release(id)

    def abort(self, id: int, reason: Finish = Finish.ABORT, now: float | None = None) -> Request | None:
        """End a request at once, wherever it is; returns it, or None if there was nothing to end."""
        self.life.now = self.life.now if now is None else now
        req = self.life.live.get(id)
        if req is None or req.state is State.HELD:
            self.life.release(id)
            return None
        self.life.finish(req, reason)
        return self.life.finished.pop()

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call other than by abort; of a sealed batch, when all of it has."""
        if self.seating.gate is not None and self.seating.gate.is_sealed and self.num_running:
            return []
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
        """True while there is something to schedule, commit or report, now or at `next_expiry`."""
        return bool(self.num_running or len(self.line) or self.life.flights or self.life.leases or self.life.finished)

    @property
    def next_expiry(self) -> float:
        """When the next lease ends; infinite if there is none. Until then nothing but a call changes leases."""
        return min(self.life.leases.values(), default=math.inf)

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute now."""
        self._draft.placed.clear()
        self.line.watch.begin(now)
        self.life.expire(now)
        for req in self.line.take_hopeless(now):
            self.seating.shed(req)
        self.line.begin_step(self.life.step)
        self.rows.advance()
        self._leave_foreseen()
        self.seating.displace(now)
        self._rest(now)
        self._continue_decode()
        room = self.filling.room()
        self.seating.admit(now, room, self.filling.num_wanted, self._draft)
        self.filling.fill(room, self._draft)
        self.seating.settle()
        self.line.watch.end(now)
        if not self._draft.chunks and not self.rows.num_decoding:
            return self._unstick(now)
        return self._hand_out()

    def _hand_out(self) -> StepPlan:
        draft, self._draft = self._draft, Draft()
        decode, ids, sinks = self.rows.columns()
        copies = self.ledger.drain_copies()
        plan = StepPlan(
            id=self.life.step,
            decode=decode,
            chunks=[chunk for chunk, _ in draft.chunks],
            joins=draft.joins,
            leaves=self.life.leaves,
            grows=draft.grows,
            copies=copies,
            work=draft.work(len(decode), self.rows.context(self.life.step))._replace(copies=len(copies)),
        )
        self.life.flights.append(Flight(plan, ids, sinks, draft.chunks))
        self.ledger.pool.newest = plan.id
        self.life.leaves = []
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

    def _rest(self, now: float) -> None:
        """Those whom the policy lets sit this step out do, the others come back; their cells stay theirs."""
        if self.rows.resting or self.policy.gap() < math.inf:
            tokens = min(self.filling.num_wanted, self.seating.limits.tokens)
            work = Work(tokens, pairs_of(0, tokens), *self.rows.load(self.life.step), chunks=tokens > 0)
            self.rows.rest(self.policy.rests(now, work), self.life.step)

    def _continue_decode(self) -> None:
        """Provide the cells that decode rows write in this step, at the expense of others if need be."""
        step, rows = self.life.step, self.rows
        due = rows.crossings.take(step)
        if len(due) > self.ledger.pool.available - self.ledger.promised:
            due.sort(key=lambda row: self.seating.victim_order(self._at(row)))
        for row in due:
            if not rows.is_decoding(row):  # has sampled its last token, or was preempted a moment ago
                continue
            cell = rows.cell(row, step)
            if self.seating.make_room(self._at(row), cell, cell + 1, self._draft):
                rows.next_crossing(row, step, cell)

    def _at(self, row: int) -> Request:
        req = self.rows.req[row]
        assert req is not None, f"row {row} is empty"
        return req

    def _unstick(self, now: float) -> StepPlan | None:
        """Nothing was planned. If nothing is in flight either, whoever waits must move or be told."""
        if self.life.flights or not len(self.line):
            return None
        if self.rows.resting:  # whoever decoded was preempted; now they will
            return self.schedule(now)
        head = self.seating.head(now)
        if head is None or self.life.leases or not self.seating.num_allowed(now, 1):
            return None  # a gate or a lease will open, or somebody ended just now
        is_freed = self.life.reclaim(head)
        while is_freed and not self.seating.could_sit(head):
            is_freed = self.life.reclaim(head)
        if not is_freed:
            self.life.finish(head, Finish.ERROR, "the KV cache cannot hold this request")
        return self.schedule(now)

    # ---- commit --------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float | None = None) -> Deltas:
        """Take a plan's result in: tokens to their requests, blocks to the cache, ends to `finished`."""
        self.life.now = self.life.now if now is None else now
        flight = self.life.flights.popleft()
        assert flight.plan.id == plan.id == result.plan_id, "results must come in the order of their plans"
        self.ledger.pool.collected = plan.id
        ids, tokens = self._deliver(flight, result)
        self.costs.observe(plan.work, result.elapsed)
        if self._counts_tokens:
            self._charge(flight, ids)
        lost, owner = flight.void.union(result.failed), self._owner
        logprobs = {owner(flight, row).id: said for row, said in result.logprobs.items() if row not in lost}
        for row, error in result.failed.items():
            if row not in flight.void:
                self.life.finish(owner(flight, row), Finish.ERROR, error)
        for row in result.stopped:
            if row not in lost:
                self.life.finish(owner(flight, row), Finish.STOP)
        for row in self.rows.ends.take(plan.id):
            self.life.finish(self._at(row), Finish.LENGTH)
        for req in flight.final:
            if req.id in self.life.ending:
                self.life.finish(req, Finish.LENGTH)
        self.life.emit(
            Stepped(
                step=plan.id,
                now=self.life.now,
                elapsed=result.elapsed,
                num_decode=len(plan.decode),
                num_chunks=len(plan.chunks),
                num_computed=plan.num_tokens,
                num_pairs=plan.work.pairs,
                context=plan.work.context,
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
            self.life.emit(FirstToken(req.id, step, self.life.now))
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
        """Tell the policy what each account was given in this step."""
        service: dict[Account, list[int]] = {}
        for chunk, req in flight.chunks:
            service.setdefault(req.account, [0, 0])[0] += chunk.count
        for id in ids:
            service.setdefault(self.life.live[id].account, [0, 0])[1] += 1
        for account, (num_in, num_out) in service.items():
            self.policy.on_tokens(account, num_in, num_out)
