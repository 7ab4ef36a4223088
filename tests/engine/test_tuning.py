"""Settings of a running engine: each takes effect, a bad one changes nothing, and no request is dropped or altered."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from hashing import HashExecutor, oracle
from headway.build import build_scheduler
from headway.config import CacheConfig, EngineConfig, SchedulerConfig
from headway.engine.client import EngineInfo, Submit
from headway.engine.clock import MonotonicClock
from headway.engine.engine import Engine
from headway.engine.metrics import EngineMetrics
from headway.engine.settings import LimitSettings, ShareSettings, WaitingLimit
from headway.engine.tuning import Tuning
from headway.errors import ConfigError, Overloaded
from headway.policies._caps import ordered, uncapped
from headway.values.limits import Admission, PrefillOrder, Victims
from headway.values.params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE, SLOTS = 96, 4, 8
FIELDS = (*LimitSettings.kinds, *ShareSettings.kinds, *WaitingLimit.kinds)


class Hashing(HashExecutor):
    def close(self) -> None:
        pass


def engine(depth: int = 1, **fields: Any) -> Engine:
    fields = {"max_num_seqs": SLOTS, **fields}
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), scheduler=SchedulerConfig(**fields)
    )
    clock = MonotonicClock()
    metrics = EngineMetrics(clock)
    scheduler = build_scheduler(config, NUM_BLOCKS, metrics)
    info = EngineInfo("hash", 200, 50, BLOCK_SIZE, NUM_BLOCKS, SLOTS, ())
    return Engine(
        scheduler,
        Hashing(NUM_BLOCKS, BLOCK_SIZE),  # type: ignore[arg-type]
        info,
        metrics,
        clock,
        depth=depth,
        keeps_tokens=True,
        tuning=Tuning(config.scheduler, scheduler),
    )


def test_settings_name_what_may_change_and_what_is_in_force() -> None:
    assert engine(max_num_seqs=None).reconfigure({}) == {
        "target_itl_ms": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_chunk_tokens": None,
        "max_partial_prefills": 4,
        "prefill_order": "shortest",
        "kv_admission": "optimistic",
        "victims": "least-recompute",
        "tenant_weights": "",
        "lanes": "",
        "max_waiting": 1024,
        "share_every": 0,
        "boost_after": None,
    }
    assert set(engine(policy="slo").reconfigure({})) == {*FIELDS, "beta", "patience", "share_every", "boost_after"}
    assert set(engine(policy="sjf", fair=True).reconfigure({})) == {*FIELDS, "aging", "share_every", "boost_after"}
    assert set(engine(policy="hrrn").reconfigure({})) == set(FIELDS)


@pytest.mark.parametrize("policy", ["fcfs", "slo", "sjf", "hrrn"])
def test_every_setting_has_one_owner_that_names_its_kind(policy: str) -> None:
    tuning = engine(policy=policy)._tuning
    assert tuning is not None
    named = [name for owner in tuning._owners for name in owner.kinds]
    assert len(named) == len(set(named))
    for owner in tuning._owners:
        assert list(owner.settings()) == list(owner.kinds)
        for name, value in owner.settings().items():
            owner.kinds[name].check(name, value)


def test_each_limit_takes_effect_at_once() -> None:
    one = engine()
    settings = one.reconfigure(
        {
            "target_itl_ms": 40,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 32,
            "max_chunk_tokens": 8,
            "max_partial_prefills": 2,
            "prefill_order": "arrival",
            "kv_admission": "peak",
            "victims": "last-come",
            "max_waiting": 5,
        }
    )
    limits = one.scheduler.state.limits
    assert (limits.rows, limits.tokens, limits.chunk, limits.partial) == (3, 32, 8, 2)
    assert (limits.admission, limits.victims) == (Admission.PEAK, Victims.LAST_COME)
    assert limits.prefill is PrefillOrder.ARRIVAL
    assert one.scheduler.state.pacer.target == 0.04  # type: ignore[union-attr]
    assert (settings["max_num_seqs"], settings["target_itl_ms"], settings["kv_admission"]) == (3, 40, "peak")
    for id in range(5):
        one.add(Submit(id, [1, 2], SamplingParams(max_tokens=2)))
    with pytest.raises(Overloaded):
        one.add(Submit(9, [1, 2], SamplingParams(max_tokens=2)))
    back = one.reconfigure({"target_itl_ms": None, "max_num_seqs": None, "max_chunk_tokens": None})
    assert (back["target_itl_ms"], back["max_num_seqs"], back["max_chunk_tokens"]) == (None, SLOTS, None)
    assert one.scheduler.state.pacer.target is None  # type: ignore[union-attr]


def test_what_is_in_force_may_be_sent_back_whole() -> None:
    for fields in ({}, {"policy": "slo", "lanes": "a=80,b=20"}, {"batching": "static:4", "target_itl_ms": 50.0}):
        one = engine(**fields)
        settings = one.reconfigure({})
        assert one.reconfigure(settings) == settings


def test_shares_change_for_waiting_requests() -> None:
    one = engine(fair=True, lanes="interactive=80,batch=20", tenant_weights="ann=2")
    for id, (tenant, lane) in enumerate([("ann", "batch"), ("bob", "interactive"), ("cem", "batch")]):
        one.add(Submit(id, [id], SamplingParams(), tenant=tenant, lane=lane))
    settings = one.reconfigure({"lanes": "batch=50,interactive=50", "tenant_weights": "ann=5"})
    assert settings["tenant_weights"] == "ann=5"
    lanes = ordered(one.scheduler.state.waiting.queue)
    assert lanes.weights == {"interactive": 50.0, "batch": 50.0}  # type: ignore[attr-defined]
    assert list(uncapped(one.scheduler.state.policy).lanes) == ["interactive", "batch"]  # type: ignore[attr-defined]
    inner = lanes.queues()  # type: ignore[attr-defined]
    assert [tenants.weights for tenants in inner] == [{"ann": 5.0}] * 2


def test_options_of_the_policy_reorder_waiting_requests() -> None:
    one = engine(policy="sjf", fair=True)
    for id, length in enumerate([30, 20, 10]):
        one.add(Submit(id, [1 + id] * length, SamplingParams(max_tokens=10)))
    queue = one.scheduler.state.waiting.queue
    assert queue.peek(0.0).id == 2  # type: ignore[union-attr]
    settings = one.reconfigure({"aging": 1e6, "share_every": 0})
    assert (settings["aging"], settings["share_every"]) == (1e6, 0)
    assert queue.peek(0.0).id == 0  # type: ignore[union-attr]
    settings = one.reconfigure({"policy_options": "aging=0,boost_after=7.5"})
    assert (settings["aging"], settings["boost_after"]) == (0, 7.5)
    assert queue.peek(0.0).id == 2  # type: ignore[union-attr]
    assert one.reconfigure({"boost_after": None})["boost_after"] is None
    assert one.reconfigure({"boost_after": 7.5})["boost_after"] == 7.5
    assert one.reconfigure({"policy_options": "boost_after=null"})["boost_after"] is None


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        ({}, {"max_num_seqs": 9}, "max_num_seqs is 9; allowed: up to 8, the slots it started with"),
        ({}, {"max_num_seqs": 0}, "max_num_seqs is 0; allowed: 1 or more"),
        ({}, {"max_num_seqs": "4"}, "max_num_seqs is '4'; allowed: a whole number or null"),
        ({}, {"max_num_seqs": 2.5}, "max_num_seqs is 2.5; allowed: a whole number or null"),
        ({}, {"max_num_seqs": True}, "max_num_seqs is True; allowed: a whole number"),
        ({}, {"target_itl_ms": -1}, "target_itl_ms is -1; allowed: above 0"),
        ({}, {"target_itl_ms": float("inf")}, "target_itl_ms is inf; allowed: a number or null"),
        ({}, {"max_num_batched_tokens": 4}, r"is 4; allowed: max_num_seqs \(8\) or more"),
        ({}, {"kv_admission": "hopeful"}, "'hopeful'; allowed: optimistic, peak, reserve"),
        ({}, {"max_waiting": None}, "max_waiting is None; allowed: a whole number"),
        (
            {},
            {"beta": 3},
            "'beta' cannot be changed while it runs: it is not a setting of policy 'fcfs'; allowed: target",
        ),
        ({}, {"policy": "slo"}, "'policy' cannot be changed while it runs: it needs a restart"),
        ({}, {"tenant_weights": "ann=2"}, "restart with fair"),
        ({}, {"lanes": "a=1"}, "allowed: none, as it was started without"),
        ({"lanes": "a=1,b=2"}, {"lanes": "a=1,c=2"}, "allowed: other shares of a, b; other lanes need a restart"),
        ({"lanes": "a=1,b=2"}, {"lanes": "a=1,b"}, "names with shares above 0"),
        ({"lanes": "a=1,b=2"}, {"tenant_weights": "ann=2"}, "restart with fair"),
        ({"batching": "static:8"}, {"kv_admission": "peak"}, "always reserve with batching static:8"),
        ({"batching": "naive"}, {"max_partial_prefills": 2}, "always the whole batch with batching naive"),
        ({"policy": "slo"}, {"beta": -1}, "beta is -1; allowed: a number of at least 0"),
        ({"policy": "slo"}, {"beta": None}, "beta is None; allowed: a number of at least 0"),
        ({"policy": "slo"}, {"patience": 0}, "patience is 0; allowed: a number above 0"),
        ({"policy": "sjf"}, {"share_every": 2.5}, "share_every is 2.5; allowed: a whole number of at least 0"),
        ({"policy": "sjf"}, {"boost_after": 0}, "boost_after is 0; allowed: a number above 0, or null for never"),
        ({"policy": "hrrn"}, {"share_every": 3}, "is not a setting of policy 'hrrn'"),
        ({"policy": "lpm"}, {"policy_options": "share_every=3"}, "is not a setting of policy 'lpm'"),
    ],
)
def test_a_bad_value_changes_nothing(fields: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    one = engine(**fields)
    before, limits = one.reconfigure({}), one.scheduler.state.limits
    with pytest.raises(ConfigError, match=words):
        one.reconfigure({"max_waiting": 77, "max_chunk_tokens": 3, **changes})
    assert one.reconfigure({}) == before
    assert one.scheduler.state.limits == limits
    assert one._max_waiting == 1024


def test_an_engine_without_tuning_says_so() -> None:
    one = engine()
    one._tuning = None
    with pytest.raises(ConfigError, match="built by hand"):
        one.reconfigure({})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "slo", "sjf", "priority"])
def test_no_request_is_dropped_or_answered_otherwise_while_everything_changes(policy: str, depth: int) -> None:
    one = engine(depth, policy=policy)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    prompts = {id: [(id + 3 * j) % 50 for j in range(2 + id % 40)] for id in range(60)}
    for id, prompt in prompts.items():
        one.add(Submit(id, prompt, params, seed=id, tenant=str(id % 3), priority=id % 2))
    changes: Any = cycle(
        [
            {"max_num_seqs": 2, "kv_admission": "reserve"},
            {"max_num_batched_tokens": 16, "max_chunk_tokens": 3, "victims": "last-come"},
            {"max_num_seqs": 8, "kv_admission": "peak", "share_every": 3},
            {"target_itl_ms": 5.0, "prefill_order": "arrival", "boost_after": 1.0},
            {"target_itl_ms": None, "kv_admission": "optimistic", "max_num_batched_tokens": 200},
            {"max_chunk_tokens": None, "share_every": 0, "boost_after": None, "victims": "least-recompute"},
        ]
    )
    answers: dict[int, list[int]] = {}
    steps = 0
    while one.has_work:
        if steps % 5 == 4:
            one.reconfigure(next(changes))
        steps += 1
        for output in one.step().finished:
            assert output.error is None, output.error
            answers[output.id] = list(output.tokens)
    assert steps > 60
    assert answers == {id: oracle(prompt, params, id, frozenset()) for id, prompt in prompts.items()}
