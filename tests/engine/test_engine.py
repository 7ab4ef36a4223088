"""The loop over the null executor: order by depth alone, one terminal output each, metrics, clocks, refusals."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from headway.control.costs import CostModel, CostWeights
from headway.control.forecast import Backlog
from headway.control.slo_admission import SloAdmission
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.clock import MonotonicClock, VirtualClock
from headway.engine.engine import Engine
from headway.engine.executor import Capacity
from headway.engine.metrics import EngineMetrics
from headway.engine.null import NullExecutor
from headway.engine.virtual import VirtualExecutor
from headway.errors import Overloaded, RequestError, Unreachable
from headway.policies.slo import SloAware
from headway.request_limits import LIMITS
from headway.values.events import Admitted, Event, Finished, FirstToken, Preempted, Queued, Stepped
from headway.values.limits import Limits
from headway.values.params import SamplingParams, Slo
from headway.values.plan import StepPlan, StepResult, TokenLogprob
from headway.values.work import Work


class Watched(NullExecutor):
    """Notes the order of submit and collect, and lets a step take a second of virtual time."""

    def __init__(self, clock: VirtualClock, **options: object) -> None:
        super().__init__(Capacity(32, 4, 4), **options)  # type: ignore[arg-type]
        self.calls: list[str] = []
        self._clock = clock

    def submit(self, plan: StepPlan) -> None:
        self.calls.append(f"S{plan.id}")
        super().submit(plan)

    def collect(self) -> StepResult:
        self._clock.advance(1.0)
        result = super().collect()
        self.calls.append(f"C{result.plan_id}")
        return result


def make(
    depth: int = 1, max_waiting: int = 4, policy: Policy | None = None, **options: object
) -> tuple[Engine, Watched]:
    clock = VirtualClock()
    metrics = EngineMetrics(clock)
    executor = Watched(clock, **options)
    scheduler = Scheduler(KVLedger(32, 4), Limits(4, 16), policy or Policy(), sink=metrics)
    info = EngineInfo("null", 64, 100, 4, 32, 4, eos_ids=(9,))
    return Engine(scheduler, executor, info, metrics, clock, depth=depth, max_waiting=max_waiting), executor


def submit(id: int, num_prompt: int = 4, **params: object) -> Submit:
    return Submit(id, list(range(num_prompt)), SamplingParams(**{"max_tokens": 3, **params}))  # type: ignore[arg-type]


def run(engine: Engine) -> tuple[dict[int, int], list[Output]]:
    counts: dict[int, int] = {}
    outputs: list[Output] = []
    while engine.has_work:
        emission = engine.step()
        for id in emission.ids:
            counts[id] = counts.get(id, 0) + 1
        outputs += emission.finished
    return counts, outputs


@pytest.mark.parametrize(
    ("depth", "calls"),
    [
        (1, ["S0", "C0", "S1", "C1", "S2", "C2"]),
        (2, ["S0", "S1", "C0", "S2", "C1", "C2"]),
        (3, ["S0", "S1", "S2", "C0", "C1", "C2"]),
    ],
)
def test_the_order_of_submit_and_collect_depends_on_the_depth_alone(depth: int, calls: list[str]) -> None:
    engine, executor = make(depth)
    engine.add(submit(1))
    counts, outputs = run(engine)
    assert executor.calls == calls
    assert counts == {1: 3}
    assert [(output.id, output.finish) for output in outputs] == [(1, "length")]


def test_times_of_a_request_are_the_clocks() -> None:
    engine, _ = make()
    engine.add(submit(1))
    (output,) = run(engine)[1]
    assert output.timing is not None
    assert (output.timing.queued_s, output.timing.first_token_s, output.timing.total_s) == (0.0, 1.0, 3.0)


def test_a_failed_row_reports_its_reason_and_aborted_requests_their_end() -> None:
    engine, _ = make(fails={1: 2})
    for id in (1, 2, 3):
        engine.add(submit(id))
    engine.step()
    aborted = engine.abort(3)
    assert aborted is not None
    assert aborted.finish == "abort"
    assert engine.abort(3) is None
    stopped = engine.abort(2, "stop")
    assert stopped is not None
    assert stopped.finish == "stop"
    _, outputs = run(engine)
    assert [(output.id, output.finish, output.error) for output in outputs] == [(1, "error", "told to fail")]
    assert engine.stats().finished == {"abort": 1, "stop": 1, "error": 1}


def test_more_than_may_wait_is_refused_and_nothing_is_lost() -> None:
    engine, _ = make(max_waiting=2)
    for id in (1, 2):
        engine.add(submit(id))
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        engine.add(submit(3))
    assert not engine.has_room
    counts, _ = run(engine)
    assert counts == {1: 3, 2: 3}


def test_what_a_front_end_forgot_to_check_does_not_reach_the_scheduler() -> None:
    engine, _ = make()
    for bad, param in (
        (Submit(1, [], SamplingParams()), "prompt"),
        (Submit(1, [100], SamplingParams(max_tokens=1)), "prompt"),
        (Submit(1, [-1], SamplingParams(max_tokens=1)), "prompt"),
        (Submit(1, [1] * 64, SamplingParams(max_tokens=1)), "prompt"),
        (Submit(1, [1] * 60, SamplingParams(max_tokens=5)), "max_tokens"),
        (submit(1, logit_bias={100: 1.0}), "logit_bias"),
        (submit(1, stop_token_ids=[100]), "stop_token_ids"),
        (submit(1, stop=["x"] * (LIMITS.stops + 1)), "stop"),
        (submit(1, stop="x" * (LIMITS.stop_chars + 1)), "stop"),
        (submit(1, stop_token_ids=[1] * (LIMITS.stop_token_ids + 1)), "stop_token_ids"),
        (submit(1, logit_bias=dict.fromkeys(range(LIMITS.logit_bias + 1), 1.0)), "logit_bias"),
        (replace(submit(1), salt="x" * (LIMITS.salt_chars + 1)), "cache_salt"),
        (replace(submit(1), tenant="x" * (LIMITS.tenant_chars + 1)), "user"),
        (replace(submit(1), priority=-LIMITS.priority - 1), "priority"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.add(bad)
        assert caught.value.param == param
    assert not engine.has_work


def test_the_stop_set_is_eos_unless_ignored_and_the_requests_own() -> None:
    engine, _ = make()
    engine.add(submit(1))
    engine.add(submit(2, ignore_eos=True, stop_token_ids=[5]))
    live = engine.scheduler.state.live
    assert (live[1].stop_ids, live[2].stop_ids) == (frozenset({9}), frozenset({5}))


def test_salts_and_models_do_not_share_blocks() -> None:
    engine, _ = make()
    engine.add(submit(1, 8))
    engine.add(Submit(2, list(range(8)), SamplingParams(max_tokens=3), salt="other"))
    live = engine.scheduler.state.live
    assert not set(live[1].keys) & set(live[2].keys)


def test_stats_add_up() -> None:
    engine, _ = make()
    for id in (1, 2):
        engine.add(submit(id, 4 + id))
    run(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free, stats.blocks_total) == (0, 0, 32, 32)
    # The second waits a step for the block it shares with the first, and then computes only what is its own.
    assert (stats.tokens_computed, stats.tokens_generated, stats.tokens_cached) == (5 + 2 + 2 + 2, 6, 4)
    assert stats.steps == 4
    engine.close()


def test_clocks_do_not_go_back() -> None:
    clock = VirtualClock(5.0)
    clock.advance(0.5)
    assert clock.now() == 5.5
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="cannot go back"):
            clock.advance(bad)
    real = MonotonicClock()
    assert real.now() <= real.now()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_an_engine_that_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch, where: str, depth: int) -> None:
    engine, executor = make(depth)
    real = getattr(executor, where)

    def interrupted(*args: object) -> object:
        monkeypatch.setattr(executor, where, real)
        if where == "submit":
            real(*args)
        raise KeyboardInterrupt

    engine.add(submit(1))
    engine.add(submit(2))
    engine.step()
    monkeypatch.setattr(executor, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.abort(1) is not None
    engine.add(submit(3))
    _, outputs = run(engine)
    assert [(output.id, output.finish) for output in outputs] == [(2, "length"), (3, "length")]
    assert not engine.has_work


def test_a_request_that_would_be_late_is_rejected_and_the_others_of_its_prompt_are_not() -> None:
    clock, policy, costs = VirtualClock(), SloAware(), CostModel(CostWeights(base=1.0, tokens=0.5))
    metrics = EngineMetrics(clock)
    scheduler = Scheduler(KVLedger(32, 4), Limits(1, 16), policy, sink=metrics, costs=costs, observer=Backlog())
    info = EngineInfo("null", 300, 100, 4, 32, 1)
    engine = Engine(scheduler, Watched(clock), info, metrics, clock, slo_admission=SloAdmission(policy, costs))
    wanted = Submit(0, [1] * 4, SamplingParams(max_tokens=3), slo=Slo(ttft=3.0))
    engine.add(wanted)
    engine.step()
    with pytest.raises(Unreachable, match="after about 4 s, 1 s later than this request's slo allows") as caught:
        engine.add(replace(wanted, id=1, tokens=[2] * 4))
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert metrics.finished == {"shed": 1}
    engine.add(replace(wanted, id=2, tokens=[2] * 4, parent=0))
    with pytest.raises(RequestError, match="KV cache"):
        engine.add(replace(wanted, id=3, tokens=[1] * 200))
    engine.add(replace(wanted, id=4, tokens=[3] * 4, slo=Slo(ttft=100.0)))
    _, outputs = run(engine)
    assert {output.id: output.timing and output.timing.predicted_s for output in outputs} == {0: 3.0, 2: 4.0, 4: 6.0}


class Noting(EngineMetrics):
    """Keeps the events, with what the clock said when each one came."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.seen: list[tuple[Event, float]] = []

    def emit(self, event: Event) -> None:
        super().emit(event)
        self.seen.append((event, self._clock.now()))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_event_bears_the_time_at_which_it_happens(depth: int) -> None:
    clock = VirtualClock(100.0)
    metrics = Noting(clock)
    scheduler = Scheduler(KVLedger(32, 4), Limits(4, 16), Policy(), sink=metrics)
    info = EngineInfo("null", 64, 100, 4, 32, 4, eos_ids=(9,))
    engine = Engine(scheduler, Watched(clock), info, metrics, clock, depth=depth)
    for id in range(3):
        engine.add(submit(id, max_tokens=6))
        clock.advance(0.25)
    engine.step()
    engine.step()
    preempt(scheduler.state, scheduler.state.rows.running()[0])
    engine.step()
    clock.advance(7.0)
    assert engine.abort(1) is not None
    run(engine)
    kinds = {type(event) for event, _ in metrics.seen}
    assert kinds == {Queued, Admitted, Preempted, FirstToken, Finished, Stepped}
    assert [event.now for event, _ in metrics.seen] == [at for _, at in metrics.seen]


def test_a_virtual_step_costs_what_its_plan_says() -> None:
    clock = VirtualClock()
    executor = VirtualExecutor(Capacity(8, 4, 4), clock, CostModel(CostWeights(base=1.0, tokens=0.25, copies=0.5)), {})
    executor.submit(StepPlan(0, array("i", [1]), work=Work(decode=1)))
    executor.submit(StepPlan(1, array("i", [1]), work=Work(tokens=4, decode=1, chunks=1, copies=1)))
    assert [executor.collect().elapsed, clock.now()] == [1.0, 1.0]
    assert [executor.collect().elapsed, clock.now()] == [2.5, 3.5]


def test_a_plan_says_what_it_carries() -> None:
    scheduler = Scheduler(KVLedger(32, 4), Limits(4, 16), Policy())
    for id, num_prompt in enumerate((3, 20)):
        scheduler.add(Request(id, list(range(num_prompt)), SamplingParams(max_tokens=9)))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    assert first.work == Work(tokens=16, pairs=3 * 3 + 13 * 13, chunks=2)
    assert second.work == Work(tokens=7, pairs=(2 * 13 + 7) * 7, decode=1, context=3, chunks=1)


def test_lengths_are_asked_for_when_they_are_needed_and_learned_from_answers() -> None:
    engine, _ = make()
    engine.add(submit(0, max_tokens=16))
    req = engine.scheduler.state.live[0]
    ceiling_of = engine.scheduler.state.ceiling_of
    assert (req.ceiling, ceiling_of(req)) == (0.0, engine.info.max_model_len)
    run(engine)
    assert engine.lengths.expect("", "", 1000).median == pytest.approx(16)
    assert 16 <= ceiling_of(req) < engine.info.max_model_len, "the same request, and more is known by now"


class WithLogprobs(Watched):
    """Says a log probability for every token of request 1, which has row 1."""

    def collect(self) -> StepResult:
        result = super().collect()
        return replace(result, logprobs={1: [TokenLogprob(-0.5)]} if len(result.tokens) > 1 else {})


def test_log_probabilities_come_beside_the_columns_by_request() -> None:
    engine, _ = make()
    engine._executor = WithLogprobs(engine._clock)  # type: ignore[arg-type]
    for id in range(2):
        engine.add(submit(id, num_prompt=3 - id))
    emission = engine.step()
    assert (emission.ids, emission.tokens, emission.finished) == ([0, 1], [1, 1], [])
    assert emission.logprobs == {1: [TokenLogprob(-0.5)]}


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    engine, _ = make()
    with pytest.raises(RequestError, match=r"adapter is 'polite'; allowed: none") as refused:
        engine.add(Submit(1, [1, 2], SamplingParams(max_tokens=1), adapter="polite"))
    assert refused.value.param == "adapter"
    engine.info = replace(engine.info, adapters={"terse": "1", "polite": "2"})
    engine.add(Submit(1, [1, 2], SamplingParams(max_tokens=1), adapter="polite"))
    with pytest.raises(RequestError, match="allowed: terse, polite"):
        engine.add(Submit(2, [1, 2], SamplingParams(max_tokens=1), adapter="rude"))


@pytest.mark.parametrize("other", [{"namespace": b"b"}, {"adapter": "polite"}, {"salt": "s"}])
def test_submits_share_blocks_within_one_namespace_only(other: dict) -> None:
    engine, _ = make()
    engine.info = replace(engine.info, adapters={"polite": "2"})
    cached = []
    for id, fields in enumerate([{"namespace": b"a"}, {"namespace": b"a", **other}, {"namespace": b"a"}]):
        engine.add(Submit(id, list(range(12)), SamplingParams(max_tokens=1), **fields))
        outputs = []
        while engine.has_work:
            outputs += engine.step().finished
        cached += [output.cached_tokens for output in outputs]
    assert cached == [0, 0, 11]


def test_a_field_that_the_backend_does_not_honour_is_refused_by_name() -> None:
    engine, _ = make()
    submit = Submit(1, [1, 2], SamplingParams(max_tokens=2, xtc_probability=0.5))
    engine.validate(submit)
    engine.info = replace(engine.info, lacks=("dry_multiplier", "xtc_probability"))
    with pytest.raises(RequestError, match=r"xtc_probability is 0\.5.*leave it out") as refused:
        engine.validate(submit)
    assert refused.value.param == "xtc_probability"
    engine.validate(replace(submit, params=SamplingParams(max_tokens=2, xtc_threshold=0.3)))
