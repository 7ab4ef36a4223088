"""The benches print their documented fields; no test depends on speed."""

from __future__ import annotations

import json

import pytest

from headway.bench import kv, scheduler, scheduler_cases
from headway.bench.policy import compare
from headway.cli.main import main
from headway.errors import ConfigError


def test_scheduler_bench_ends_with_one_object_of_all_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "RUNNING", (64,))
    monkeypatch.setattr(scheduler, "QUEUES", (100, 200))
    assert scheduler.run(as_json=True, steps=20, policies=("fcfs", "lanes")) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    found = [(row["policy"], row["queue"], row["running"]) for row in rows]
    assert found == [("fcfs", 100, 64), ("fcfs", 200, 64), ("lanes", 100, 64), ("lanes", 200, 64)]
    assert all(row["us_per_step"] > 0 and row["p99_us"] >= row["us_per_step"] for row in rows)


def test_a_measured_step_makes_the_changes_it_states() -> None:
    row = scheduler.measure("fcfs", 64, 100, steps=50)
    # One end, one admission for it, one for the aborted and one for the preempted, two aborts, one preemption.
    assert 6 <= row.changes_per_step <= 8


def test_common_prefix_measures_the_first_step_the_one_that_finds_all_ready_and_add() -> None:
    now = 0.0

    def timer() -> float:  # a timer that moves by one second per call: every step then takes two of them
        nonlocal now
        now += 1.0
        return now

    row = scheduler_cases.common_prefix("sjf", waiting=300, steps=12, timer=timer)
    assert (row.case, row.policy, row.queue, row.steps) == ("common-prefix", "sjf", 300, 12)
    assert row.us_first == row.us_median == row.us_max == 2e6
    assert row.us_add == pytest.approx(1e6 / 300, abs=0.01)
    assert row.running > 32, "the prefix was computed, and requests behind it were admitted"


def test_feedback_measures_rows_that_are_a_chunk_each() -> None:
    row = scheduler_cases.feedback("fcfs", rows=40, steps=8)
    assert (row.case, row.queue, row.running) == ("feedback", 0, 40)
    assert 0 < row.us_median <= row.us_p99 <= row.us_max
    assert row.us_add is None


def test_scheduler_cases_print_what_is_over_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    slow = scheduler_cases.CaseRow("common-prefix", "sjf", 20_000, 256, 400, 50.0, 2e4, 50.0, 50.0, 30.0)
    quick = scheduler_cases.CaseRow("common-prefix", "fcfs", 20_000, 256, 400, 50.0, 60.0, 50.0, 50.0, 3.0)
    found = {"sjf": slow, "fcfs": quick}
    policies = ("sjf", "fcfs")
    assert scheduler_cases.run(["common-prefix"], True, policies, measure=lambda _, policy: found[policy]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].endswith("over: us_max, us_add")
    assert printed[2].endswith(" ok")
    rows = json.loads(printed[-1])["rows"]
    assert [row["policy"] for row in rows] == ["sjf", "fcfs"]
    assert {"case", "policy", "queue", "us_max", "us_p99", "us_median"} <= rows[0].keys()


def test_every_scheduler_case_names_its_rows_alike() -> None:
    row = scheduler.measure("fcfs", 16, 20, steps=10)
    assert row.case == "steady"
    assert (row.us_median, row.us_p99) == (row.us_per_step, row.p99_us)
    assert row.us_max >= row.us_p99


def test_a_scheduler_case_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="no case 'deep'; there are: steady, common-prefix, feedback"):
        scheduler_cases.run(["steady", "deep"])


def test_a_policy_that_there_is_not_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for bench in (["scheduler"], ["policy", "--case", "steady"]):
        assert main(["bench", *bench, "--policy", "fcfs", "--policy", "nonsense"], {}) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "'nonsense'" in err
        assert all(name in err for name in ("fcfs", "sjf", "slo", "my.module:Thing"))
    assert main(["bench", "policy", "--policy", "sjf", "--case", "fixture"], {}) == 2
    assert "there is no case 'fixture' for --policy; there are: steady, overload, bursts" in capsys.readouterr().err


def test_several_cases_and_policies_are_measured_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(case: str, policy: str) -> scheduler_cases.CaseRow:
        return scheduler_cases.CaseRow(case, policy, 20_000, 256, 400, 50.0, 60.0, 50.0, 50.0, 3.0)

    assert scheduler_cases.run(["feedback", "common-prefix"], True, ["sjf", "fcfs"], measure=measure) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["case"], row["policy"]) for row in rows] == [
        *(("feedback", "sjf"), ("feedback", "fcfs")),
        *(("common-prefix", "sjf"), ("common-prefix", "fcfs")),
    ]


def test_policies_are_compared_on_the_same_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "SECONDS", 40.0)
    command = ["bench", "policy", "--policy", "slo", "--policy", "headway.policies.sjf:PLUGIN", "--case", "overload"]
    assert main([*command, "--json", "--seed", "3"], {}) == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["policy"] for row in rows] == ["fcfs", "slo", "headway.policies.sjf:PLUGIN"]
    assert {row["case"] for row in rows} == {"overload"}
    assert len({row["requests"] for row in rows}) == 1
    assert rows[1]["objectives_met"] > rows[0]["objectives_met"], "slo is for that"
    assert "objectives met" in out
    assert "TTFT P99" in out
    assert main([*command, "--json", "--seed", "3"], {}) == 0
    assert capsys.readouterr().out == out, "equal seeds print equal bytes"


def test_kv_bench_measures_the_waste_of_the_default_block_below_four_percent() -> None:
    row = kv.measure(kv.DEFAULT_BLOCK_SIZE, requests=80)
    assert row.mean_length >= 25 * kv.DEFAULT_BLOCK_SIZE * 0.98
    assert 0 < row.waste < 0.04
    assert row.waste == pytest.approx(row.bound, rel=0.2)


def test_kv_bench_prints_the_sweep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "BLOCK_SIZES", (16, 256))
    assert kv.run(as_json=True) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["block_size"] for row in rows] == [16, 256]
    assert rows[0]["waste"] < rows[1]["waste"]
