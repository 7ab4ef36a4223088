"""The only loop in the system: drain commands, schedule, submit, collect, commit, emit.

    depth 1     S0 X0 C0   S1 X1 C1            S schedule and submit, X the executor runs, C collect and commit
    depth 2     S0 S1 C0 S2 C1 S3 C2           X0 runs while S1 is made: the host's work hides behind the device

The order of schedule, submit and collect depends on the depth alone, never on whether a result happens to be
ready, so a recorded run replays. One thread owns an engine; other threads and processes use an `EngineClient`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from headway.config_text import AdapterSource
from headway.control.lengths import Expected, Lengths
from headway.control.slo_admission import SloAdmission
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.adapters import EngineAdapters
from headway.engine.arrival import forecast_ttft
from headway.engine.block_log import BlockLog
from headway.engine.client import CacheHit, EngineInfo, Output, Settings, Stats, Submit
from headway.engine.clock import Clock
from headway.engine.constrained import FAULT, Constraints
from headway.engine.executor import Executor, Prepares
from headway.engine.explain import Explanation
from headway.engine.garbage import collect_young
from headway.engine.limits import require_valid
from headway.engine.messages import BlockNews
from headway.engine.metrics import EngineMetrics
from headway.engine.mover import LOAD_LEASE_S, BlockMover
from headway.engine.published import Published, Publisher
from headway.engine.speculating import Speculation
from headway.engine.stats import stats_of
from headway.engine.tuning import Tuning
from headway.errors import ConfigError, Overloaded, Unreachable
from headway.kv.prefix import chain_keys, chain_seed
from headway.values.plan import Emission, StepPlan
from headway.values.states import Finish


def _size(plan: StepPlan) -> int:
    return (
        8 + plan.work.tokens + plan.work.decode + plan.work.verify
    )  # a step has a cost of its own, about that of so many tokens


class Engine:
    """Single-threaded owner of one scheduler and one executor; at most `depth` plans are uncollected."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        metrics: EngineMetrics,
        clock: Clock,
        *,
        identity: str = "",
        depth: int = 1,
        max_waiting: int = 1024,
        keeps_tokens: bool = False,
        tuning: Tuning | None = None,
        slo_admission: SloAdmission | None = None,
        blocks: BlockLog | None = None,
        mover: BlockMover | None = None,
        constraints: Constraints | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.info = info
        self.metrics = metrics
        self._executor = executor
        self._clock = clock
        self._identity = identity  # of model and KV layout: blocks are never shared beyond it
        self._depth = depth
        self._max_waiting = max_waiting
        self._keeps_tokens = keeps_tokens  # a terminal output carries the whole answer, for callers that skip columns
        self._tuning = tuning
        self._slo_admission = slo_admission  # None: all requests are accepted and no TTFT is predicted
        self._blocks = blocks  # told by the ledger what comes to the prefix cache and goes
        self._mover = mover  # None: KV neither comes from elsewhere nor goes there
        self._constraints = constraints  # None: no request may bring a grammar
        self._speculation = speculation  # None: no guesses
        self.adapters: EngineAdapters | None = None  # what loads and unloads those of `info`; None: nothing does
        self._step_s = 0.0  # of the last step
        self._eos = frozenset(info.eos_ids)
        self._publisher = Publisher(scheduler)
        self._last_id = 0
        self.lengths = Lengths()
        scheduler.state.ceiling_of = self._ceiling_of
        self._pending: deque[StepPlan] = deque()
        self._told: Callable[[float], None] | None = None
        self._slowest = math.nan  # seconds per token of the slowest step so far, by what it carried

    @property
    def num_steps(self) -> int:
        """Steps that are committed."""
        return self.metrics.steps

    def announce(self, told: Callable[[float], None]) -> None:
        """Call `told` when a step begins, with its predicted seconds; not a number where that is unknown."""
        self._told = told

    def add(self, submit: Submit) -> None:
        """Accept a request, or raise RequestError, Overloaded or Unreachable.

        What is accepted gets exactly one terminal output.
        """
        self._last_id = max(self._last_id, submit.id)
        self.validate(submit)
        if self._mover is not None:  # an earlier part of the same request may be kept for a peer, which is this engine
            self._mover.drop(submit.id)
            self.scheduler.release(submit.id)
        if not (self.has_room or submit.is_resumed or self._publisher.takes(submit.group, self._most_queued)):
            num_waiting = self.scheduler.num_waiting + self._max_waiting - self._most_queued
            raise Overloaded(f"{num_waiting} requests are waiting, the limit; try again later")
        req = self._request(submit)
        predicted = None if submit.is_resumed else self._reject_infeasible(req)
        if submit.params.grammar and self._constraints is not None:
            self._constraints.begin(req, lambda req: self._enter(req, submit, predicted))
        else:
            self._enter(req, submit, predicted)

    def _enter(self, req: Request, submit: Submit, predicted: float | None) -> None:
        if self._mover is None:
            self.scheduler.add(req)
        else:
            add = partial(self.scheduler.add, lease_s=LOAD_LEASE_S)
            self._mover.begin(req, submit.fetch_from, add, submit.fetch_tokens)
        if self._speculation is not None and submit.speculates:
            self._speculation.begin(req)  # not one that was refused
        if submit.is_resumed or req.num_output:
            self.metrics.note_resumed(req.id, has_begun=req.num_output > 0)
        if predicted is not None:
            self.metrics.note_prediction(req.id, predicted)

    def _reject_infeasible(self, req: Request) -> float | None:
        """What there is to say about its first token; Unreachable if it need not come in."""
        if self._slo_admission is None or not self.scheduler.state.ledger.can_ever_hold(
            req
        ):  # the scheduler says that better
            return None
        predicted = forecast_ttft(self.scheduler, req)
        if predicted is None or req.parent in self.scheduler.state.live:  # it shares what another one computes
            return predicted
        late = self._slo_admission.rejects(req, predicted, req.arrival)
        if late is None:
            return predicted
        self.metrics.count_rejected()
        raise Unreachable(
            f"the first token would come after about {predicted:.3g} s, {late:.3g} s later than this request's slo "
            "allows; nothing was computed for it: retry later, give it more time in slo, or send it without",
            retry_after_s=late,
        )

    def predict_ttft(self, submit: Submit) -> float | None:
        """Seconds to its first token if it came now; None while the engine knows too little. Changes nothing."""
        return forecast_ttft(self.scheduler, self._request(submit))

    def _request(self, submit: Submit) -> Request:
        digest = self.info.adapters.get(submit.adapter, "")
        chain = chain_seed(self._identity, submit.salt, digest, submit.namespace)
        expected = self._expect(submit)
        params = submit.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        return Request(
            id=submit.id,
            tokens=list(submit.tokens),
            params=params,
            seed=submit.seed,
            num_prompt=submit.num_prompt,
            stop_ids=stop_ids,
            arrival=self._clock.now(),
            priority=submit.priority,
            tenant=submit.tenant,
            lane=submit.lane,
            slo=submit.slo,
            expected=expected.median,
            ceiling=expected.ceiling,
            route=submit.route,
            keys=chain_keys(submit.tokens, self.info.block_size, chain),
            chain=chain,
            parent=submit.parent,
            adapter=submit.adapter,
            group=submit.group,
            lease_s=submit.hold_s if submit.hold_s > 0 and self._mover is not None else None,
            needs_feedback=bool(params.grammar),
        )

    def _expect(self, submit: Submit) -> Expected:
        """The ranker's prediction, else the averages of its tenant and route."""
        if submit.expected > 0:
            return Expected(submit.expected, max(submit.expected, submit.ceiling))
        median = self.lengths.expect(submit.tenant, submit.route, submit.params.max_tokens).median
        return Expected(median, 0.0)  # the scheduler asks for the ceiling when it needs one: more is known by then

    def _ceiling_of(self, req: Request) -> float:
        """What most answers of its tenant and route do not exceed, whatever this request declares."""
        return self.lengths.expect(req.tenant, req.route, self.info.max_model_len).ceiling

    @property
    def has_room(self) -> bool:
        """True if one more request may wait."""
        return self.scheduler.num_waiting < self._most_queued

    @property
    def _most_queued(self) -> int:
        """Requests that may be in the queue beside those that wait for their grammars."""
        return self._max_waiting - (0 if self._constraints is None else self._constraints.num_entering)

    def validate(self, submit: Submit) -> None:
        """The engine's own guard: whatever a front end forgot must not reach the scheduler."""
        require_valid(submit, self.info, takes_grammars=self._constraints is not None)

    @property
    def entering(self) -> list[Request]:
        """Accepted requests that the scheduler has not seen yet."""
        return [] if self._constraints is None else self._constraints.entering

    def compile(self, grammar: str) -> None:
        """Compile a grammar now, so that its requests need not wait; RequestError if it cannot be."""
        if self._constraints is not None:
            self._constraints.compile(grammar)

    def load_adapter(self, source: AdapterSource) -> None:
        """Load one before this returns, for callers that step this engine themselves; ConfigError if it cannot be."""
        assert self.adapters is not None, "build_engine makes it"
        self.adapters.load_now(source)

    def unload_adapter(self, name: str) -> None:
        """Free one; ConfigError while a request has it."""
        assert self.adapters is not None, "build_engine makes it"
        self.adapters.unload(name)

    def abort(self, id: int, reason: str = "abort") -> Output | None:
        """End a request now; its terminal output, or None if it had ended already."""
        if self._mover is not None:
            self._mover.drop(id)
        if self._constraints is not None and self._constraints.drop(id):
            return Output(id, finish=reason)
        req = self.scheduler.abort(id, Finish(reason), self._clock.now())
        return None if req is None else self._terminal(req)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work or self._has_arrivals

    @property
    def _has_arrivals(self) -> bool:
        """Whether requests wait for something outside the scheduler: KV, or a grammar."""
        is_compiling = self._constraints is not None and self._constraints.has_work
        return is_compiling or (self._mover is not None and self._mover.has_work)

    def keep_blocks(self) -> None:
        """Hand new blocks to the tier now: for a caller that may not step again."""
        if self._mover is not None:
            self._mover.keep()

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` makes the loop look at this engine; it may be called on any thread."""
        for each in (self._mover, self._constraints, self.adapters):
            if each is not None:
                each.wake_by(wake)

    def step(self) -> Emission[Output]:
        """One turn of the loop."""
        now = self._clock.now()
        if self._mover is not None:
            is_idle = not self._pending and not self.scheduler.num_running
            self._mover.turn(now, is_idle=is_idle, step_s=self._step_s)
        # An abort may have ended a static batch: what waited for that is reported before the next batch begins.
        outputs = [self._terminal(req) for req in self.scheduler.take_finished()]
        outputs += [] if self._constraints is None else self._constraints.turn(now)
        if self._speculation is not None:
            self._speculation.propose()
        plan = self.scheduler.schedule(now)
        outputs += [self._terminal(req) for req in self.scheduler.take_finished()]
        if plan is not None:
            self._pending.append(plan)
            if self.metrics.journal is not None:
                self.metrics.journal.scheduled(plan, now)
            if self._told is not None:
                self._told(self._predict(plan))
            if self._constraints is not None and (late := self._constraints.masks(plan)):
                self._executor.supply(plan.id, late)
            self._executor.submit(plan)
            collect_young()
        if self._pending and (plan is None or len(self._pending) >= self._depth):
            # A plan leaves the queue only with its result: a caller that interrupts this thread may step again later.
            result = self._executor.collect()
            self._step_s = result.elapsed
            self._note_pace(self._pending[0], result.elapsed)
            if self._speculation is not None:
                self._speculation.collected(self._pending[0], result)
            made = self.scheduler.commit(self._pending.popleft(), result, self._clock.now())
            if self._constraints is not None:
                self._constraints.took(made.ids, made.tokens)
            if self._speculation is not None:
                self._speculation.took(made.ids, made.tokens)
            outputs += [self._terminal(req) for req in made.finished]
            return Emission(made.ids, made.tokens, outputs, made.logprobs)
        if plan is not None or outputs:
            return Emission(finished=outputs)
        # Where requests wait, a gate may open at a time that only the gate knows.
        is_busy = self.scheduler.num_waiting or self._has_arrivals
        expiry = now if is_busy else self.scheduler.next_expiry
        return Emission(idle_s=expiry - now if expiry < math.inf else 0.0)

    def prepare(self) -> bool:
        """Use a moment without requests for what later steps would wait for; False if nothing is left of that."""
        return isinstance(self._executor, Prepares) and not self._pending and self._executor.prepare()

    def news(self) -> Published | None:
        """What a front end should know now about waiting times; None if that is nothing new."""
        return self._publisher.news(self._clock.now(), self._last_id, self._max_waiting)

    def watch_blocks(self) -> BlockNews:
        """Which blocks the prefix cache has; from now on `block_news` says what changes."""
        return BlockNews(is_whole=True) if self._blocks is None else self._blocks.watch()

    def block_news(self) -> BlockNews | None:
        """Blocks that came and went since the last call, None: none, or it is not watched."""
        return None if self._blocks is None else self._blocks.news()

    def _predict(self, plan: StepPlan) -> float:
        """Seconds until this plan is collected: by the cost model, and never less than the slowest step suggests."""
        return self._depth * (self._slowest * _size(plan) + self.scheduler.state.costs.step(plan.work))

    def _note_pace(self, plan: StepPlan, seconds: float) -> None:
        pace, slowest = seconds / _size(plan), 0.99 * self._slowest  # one slow step is forgotten after some hundred
        self._slowest = slowest if pace <= slowest else pace

    def _terminal(self, req: Request) -> Output:
        assert req.finish is not None
        if self._mover is not None:
            self._mover.held(req)
        fault = "" if self._constraints is None else self._constraints.ended(req.id)
        if self._speculation is not None:
            self._speculation.ended(req)
        timing, journal = self.metrics.close_request(req.id), self.metrics.journal
        device_s, kv_block_s = (0.0, 0.0) if journal is None else journal.ended(req.id, timing)
        if req.finish in (Finish.STOP, Finish.LENGTH, Finish.ABORT):
            self.lengths.learn(req.tenant, req.route, req.num_output, req.finish is not Finish.STOP)
        return Output(
            req.id,
            tokens=req.tokens[req.num_prompt :] if self._keeps_tokens else (),
            finish=req.finish.value,
            error=fault or req.error,
            code=FAULT if fault else None,
            cached_tokens=min(req.num_cached, req.num_prompt),
            timing=timing,
            preemptions=req.num_preempted,
            tokens_recomputed=req.num_recomputed,
            slo_met=timing.meets(req.slo, req.finish.value, req.num_output),
            device_s=device_s,
            kv_block_s=kv_block_s,
        )

    def explain(self, id: int) -> Explanation | None:
        """Why a request waited and what it cost, while it lives and for a while after."""
        journal = self.metrics.journal
        return None if journal is None else journal.explain(id, self._clock.now())

    def look_up(self, submit: Submit) -> CacheHit:
        """What the cache has of a prompt now, in its own namespace. Changes nothing."""
        req = self._request(submit)
        found = self.scheduler.num_cached(req)
        return CacheHit(req.num_prompt, min(found, req.num_prompt - 1), forecast_ttft(self.scheduler, req))

    def reconfigure(self, changes: Settings) -> Settings:
        """Change settings from the next step on, all or none, and say what is in force then."""
        if self._tuning is None:
            raise ConfigError("this engine was built by hand, with nothing that can be changed while it runs")
        self._tuning.change(changes)
        self._max_waiting = self._tuning.max_waiting
        return self._tuning.settings()

    def stats(self) -> Stats:
        """Counters since start and gauges of now."""
        return stats_of(self.metrics, self.scheduler, self._mover, self._speculation)

    def close(self) -> None:
        for each in (self._mover, self._constraints, self.adapters):
            if each is not None:
                each.close()
        self._executor.close()
        self.metrics.close()
