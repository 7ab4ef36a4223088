"""`batching`: allowed values, the gates they make, and that a batch is admitted as a whole."""

from __future__ import annotations

import pytest
from engine.test_tuning import engine

from headway.config import SchedulerConfig
from headway.config_text import Batching, parse_batching
from headway.control.gates import NearLengths
from headway.engine.client import Submit
from headway.errors import ConfigError
from headway.policies._build import build_gate, build_policy
from headway.values.params import SamplingParams


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("continuous", Batching("continuous", 1)),
        ("naive", Batching("naive", 1)),
        ("static", Batching("static", 8)),
        ("static:3", Batching("static", 3)),
        ("dynamic", Batching("dynamic", 8, 50.0)),
        ("dynamic:4,window=0", Batching("dynamic", 4, 0.0)),
        ("dynamic:16,window=12.5,buckets", Batching("dynamic", 16, 12.5, True)),
        ("dynamic:2,buckets", Batching("dynamic", 2, 50.0, True)),
    ],
)
def test_a_text_means_a_kind_of_batches(text: str, means: Batching) -> None:
    assert parse_batching(text) == means
    assert SchedulerConfig(batching=text).batching == text


@pytest.mark.parametrize(
    "text",
    ["", "Static", "naive:2", "continuous:8", "static:0", "static:-1", "static:1.5", "static:", "static:8,buckets",
     "static:8,window=5", "dynamic:8,window=-1", "dynamic:8,window=", "dynamic:8,window=soon", "dynamic:8,buckets=3",
     "dynamic:8,buckets,buckets", "dynamic:8,", "dynamic,50", "dynamic:9999999", "static:8 "],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(batching=text)
    said = str(caught.value)
    assert said.startswith(f"batching is {text!r}; allowed: continuous, naive, static:8, dynamic:8 or dynamic:8,window")


def test_gates_are_as_wide_as_the_batch_and_no_wider_than_the_slots() -> None:
    assert build_gate(SchedulerConfig()) is None
    found = {}
    for text in ("naive", "static:3", "static:100", "dynamic:5,window=20"):
        gate = build_gate(SchedulerConfig(batching=text, max_num_seqs=16))
        assert gate is not None
        found[text] = (gate.size, gate.window)
    assert found == {
        "naive": (1, 0.0),
        "static:3": (3, 0.0),
        "static:100": (16, 0.0),
        "dynamic:5,window=20": (5, 0.02),
    }


@pytest.mark.parametrize(
    ("fields", "names"),
    [({"policy": "sjf"}, "policy"), ({"fair": True, "tenant_weights": "ann=2"}, "fair and tenant_weights"),
     ({"lanes": "a=1,b=2"}, "lanes")],
)  # fmt: skip
def test_buckets_are_an_order_of_their_own(fields: dict[str, object], names: str) -> None:
    assert isinstance(build_policy(SchedulerConfig(batching="dynamic:4,buckets")), NearLengths)
    with pytest.raises(ConfigError, match=f"an order of their own; leave out {names}, or buckets"):
        build_policy(SchedulerConfig(batching="dynamic:4,buckets", **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("batching", ["static:6", "dynamic:6,window=60000", "dynamic:6,window=60000,buckets"])
def test_a_batch_is_admitted_as_a_whole_however_long_its_prompts(batching: str) -> None:
    one = engine(batching=batching, max_num_batched_tokens=8, max_partial_prefills=1)
    for id in range(12):
        one.add(Submit(id, [id] * 30, SamplingParams(max_tokens=3 + id % 2)))
    one.step()
    assert one.scheduler.num_running == 6
    ends: list[list[int]] = []
    while one.has_work:
        done = [output.id for output in one.step().finished if output.finish is not None]
        ends += [sorted(done)] if done else []
    assert [len(batch) for batch in ends] == [6, 6], "all of a batch end together"
    # Lengths are unknown: only `max_tokens` is left to compare.
    by_length = [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert ends == (by_length if "buckets" in batching else [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])


def test_naive_is_one_at_a_time() -> None:
    one = engine(batching="naive")
    for id in range(3):
        one.add(Submit(id, [1, 2], SamplingParams(max_tokens=2)))
    most = 0
    while one.has_work:
        one.step()
        most = max(most, one.scheduler.num_running)
    assert most == 1


@pytest.mark.parametrize("batching", ["static:3", "dynamic:3,window=0"])
@pytest.mark.parametrize("depth", [1, 2])
def test_when_the_last_of_a_batch_is_aborted_its_finished_requests_are_reported(batching: str, depth: int) -> None:
    one = engine(depth, batching=batching)
    for id, most in enumerate((2, 3, 50)):
        one.add(Submit(id, [id + 1] * 4, SamplingParams(max_tokens=most)))
    while one.metrics.finished.get("length", 0) < 2:
        assert not one.step().finished
    end = one.abort(2)
    assert end is not None
    assert (end.id, end.finish) == (2, "abort")
    outputs = []
    while one.has_work:
        outputs += one.step().finished
    assert sorted((output.id, output.finish) for output in outputs) == [(0, "length"), (1, "length")]
    assert not one.metrics._timings, "every request is closed"


def test_finished_requests_of_a_batch_are_reported_before_the_next_one_begins() -> None:
    one = engine(batching="static:2")
    for id, most in enumerate((2, 50, 9, 9)):
        one.add(Submit(id, [id + 1] * 4, SamplingParams(max_tokens=most)))
    while not one.metrics.finished:
        one.step()
    assert one.abort(1) is not None
    assert [output.id for output in one.step().finished] == [0]
    assert one.scheduler.num_running == 2


def test_an_abort_in_a_batch_that_still_runs_reports_only_the_aborted() -> None:
    one = engine(batching="static:3")
    for id, most in enumerate((2, 9, 50)):
        one.add(Submit(id, [id + 1] * 4, SamplingParams(max_tokens=most)))
    while not one.metrics.finished:
        one.step()
    assert one.abort(2) is not None
    assert one.abort(0) is None, "it has ended already, and is reported with the others"
    outputs = []
    while one.has_work:
        outputs += one.step().finished
    assert [output.id for output in outputs] == [0, 1]
