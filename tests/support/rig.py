"""Drives a real scheduler over the hashing executor at any depth, and checks the invariants after every step."""

from __future__ import annotations

from collections import Counter

from hashing import HashExecutor, kv_of, oracle
from headway.core.ledger import KVLedger
from headway.core.policy import Gate, Pacer, Policy
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.kv.prefix import chain_keys, chain_seed
from headway.values.limits import Limits
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan
from headway.values.states import Finish


class EventLog:
    def __init__(self) -> None:
        self.events: list[object] = []

    def emit(self, event: object) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


class Rig:
    """Accepts requests, steps, and knows for each one what it must answer."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        rows: int = 4,
        tokens: int = 16,
        chunk: int | None = None,
        depth: int = 1,
        host_blocks: int = 0,
        caching: bool = True,
        policy: Policy | None = None,
        spare: int = 0,
        gate: Gate | None = None,
        pacer: Pacer | None = None,
        is_late: bool = False,
        **rules: object,
    ) -> None:
        self.depth = depth
        self.log = EventLog()
        self.ledger = KVLedger(num_blocks, block_size, host_blocks=host_blocks, caching=caching, names_released=True)
        limits = Limits(rows, max(rows, tokens), chunk, spare, swaps=host_blocks > 0, **rules)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.ledger, limits, policy or Policy(), sink=self.log, gate=gate, pacer=pacer
        )  # fmt: skip
        self.executor = HashExecutor(num_blocks, block_size, host_blocks, is_late=is_late)
        self.now = 0.0
        self.next_id = 0
        self.accepted: dict[int, Request] = {}
        self.prompts: dict[int, list[int]] = {}
        self.streams: dict[int, list[int]] = {}
        self.outcomes: dict[int, Finish] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: list[StepPlan] = []
        self.last_plan: dict[int, int] = {}  # handed out when a request ended
        self.arrived: dict[int, int] = {}  # tokens of loading requests whose KV is written

    def add(
        self, prompt, max_tokens: int = 4, *, seed: int = 0, stop=(), tenant: str = "", salt: str = "", **fields
    ) -> Request:
        """Requests with another tenant share no blocks, unless they are given the same `salt`."""
        params = SamplingParams(max_tokens=max_tokens)
        chain = chain_seed(salt or tenant)
        keys = chain_keys(prompt, self.ledger.block_size, chain)
        req = Request(
            self.next_id, list(prompt), params, seed, frozenset(stop), float(self.next_id),
            tenant=tenant, keys=keys, chain=chain, **fields,
        )  # fmt: skip
        self.next_id += 1
        self.scheduler.add(req)
        self.accepted[req.id], self.prompts[req.id], self.streams[req.id] = req, list(prompt), []
        return req

    def step(self) -> StepPlan | None:
        """One turn of the engine's loop: schedule, submit, and collect once `depth` plans are in flight."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self._note(self.scheduler.take_finished())
        if plan is not None:
            # Rows that decode already are not stopped when the limits shrink; nothing is added beyond the new ones.
            num_tokens = len(plan.decode) + sum(chunk.count for chunk in plan.chunks)
            assert num_tokens <= max(self.scheduler.state.limits.tokens, len(plan.decode))
            self.plans.append(plan)
            self.in_flight.append(plan)
            self.executor.submit(plan)
        elif not self.in_flight and not self.scheduler.state.leases:
            assert not self.scheduler.num_waiting, "a request waits and nothing is in flight: no progress"
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.collect()
        self.check()
        return plan

    def collect(self) -> None:
        told = self.scheduler.commit(self.in_flight.pop(0), self.executor.collect())
        for id, token in zip(told.ids, told.tokens, strict=True):
            assert id not in self.outcomes, "a token after the end"
            self.streams[id].append(token)
        self._note(told.finished)

    def may_decode_ahead(self, req: Request) -> bool:
        """Whether all its results are in, of a row that waits for them."""
        return req.needs_feedback and bool(req.num_output) and len(req.tokens) - req.num_scheduled == 1

    def arrive(self, id: int, num_tokens: int) -> None:
        """The KV of so many tokens of a loading request is there; the new part is written now."""
        req = self.accepted[id]
        self.executor.write(req.table, req.tokens[:num_tokens], self.arrived.get(id, 0))
        self.arrived[id] = num_tokens

    def load(self, id: int, num_tokens: int) -> None:
        """Like `arrive`, and reports it to the scheduler; 0: the load failed."""
        self.arrive(id, num_tokens)
        self.scheduler.loaded(id, num_tokens)
        self.check()

    def release(self, id: int) -> None:
        """The peer has read what a held request kept for it; it may do so when the plans of its end are collected."""
        req = self.accepted[id]
        if self.ledger.pool.collected >= self.last_plan[id]:
            there = self.executor.read(req.table, req.num_computed)
            assert there == kv_of(req.tokens[: req.num_computed]), "held KV is wrong"
        self.scheduler.release(id)
        self.check()

    def reset_cache(self) -> None:
        """Evict every block that only the cache holds."""
        pool = self.ledger.pool
        pool.release(pool.take(pool.available) or [])
        self.check()

    def abort(self, id: int) -> None:
        req = self.scheduler.abort(id)
        if req is not None:
            self._note([req])
        self.check()

    def drain(self, most: int = 2000) -> None:
        """Step until nothing is left; must end, and must leave nothing behind."""
        while self.scheduler.has_work or self.in_flight:
            self.step()
            most -= 1
            assert most > 0, "no end in sight"
        assert set(self.outcomes) == set(self.accepted), "an accepted request has no outcome"
        assert self.ledger.pool.available == self.ledger.pool.num_blocks
        assert self.ledger.host.available == self.ledger.host.num_blocks

    def expected(self, id: int) -> list[int]:
        req = self.accepted[id]
        return oracle(self.prompts[id], req.params, req.seed, req.stop_ids)

    def verify(self) -> None:
        """Every finished request got the oracle's answer, every other one a prefix of it."""
        for id, stream in self.streams.items():
            expected = self.expected(id)
            if self.outcomes.get(id) in (Finish.STOP, Finish.LENGTH):
                assert stream == expected, f"request {id}"
                by_stop = expected[-1] in self.accepted[id].stop_ids
                assert self.outcomes[id] is (Finish.STOP if by_stop else Finish.LENGTH)
            else:
                assert stream == expected[: len(stream)], f"request {id}"
                fails = id in self.executor.fail
                assert fails or self.outcomes.get(id) is not Finish.ERROR, f"request {id}: {self.accepted[id].error}"

    def _note(self, finished) -> None:
        for req in finished:
            assert req.id not in self.outcomes, "two ends"
            self.outcomes[req.id] = req.finish
            self.last_plan[req.id] = self.scheduler.state.step - 1

    def check(self) -> None:
        """The invariants that must hold between any two calls."""
        scheduler, ledger = self.scheduler, self.ledger
        live = scheduler.state.live
        owners = Counter(block for req in live.values() for block in req.table)
        for block in range(ledger.pool.num_blocks):
            assert ledger.pool.refs[block] == owners[block], "refs differ from owners"
        in_use = sum(1 for block in range(ledger.pool.num_blocks) if ledger.pool.refs[block])
        assert in_use + ledger.pool.available == ledger.pool.num_blocks
        hosts = Counter(block for req in live.values() for block in req.host_table)
        assert all(ledger.host.refs[block] == hosts[block] for block in range(ledger.host.num_blocks))
        places = Counter(req.id for req in scheduler.state.waiting.requests())
        places.update(req.id for req in scheduler.state.rows.running())
        places.update(list(scheduler.state.ending))
        places.update(list(scheduler.state.leases))
        assert places == Counter(dict.fromkeys(live, 1)), "a live request is in no place or in two"
        for req in live.values():
            assert len(set(req.table)) == len(req.table)
            assert req.num_computed <= len(req.table) * ledger.block_size or req.host_table
            assert all(self._has_one_chain(block, req) for block in req.table), "a block is shared across chains"
        assert len(scheduler.state.rows.running()) <= len(scheduler.state.rows.req)

    def _has_one_chain(self, block: int, req: Request) -> bool:
        return {other.chain for other in self.scheduler.state.live.values() if block in other.table} == {req.chain}
