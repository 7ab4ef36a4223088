"""The benches print what they promise; how fast anything is, no test says."""

from __future__ import annotations

import json

import pytest

from headway.bench import kv, scheduler


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


def test_a_measured_step_makes_the_changes_it_promises() -> None:
    row = scheduler.measure("fcfs", 64, 100, steps=50)
    # One end, one admission for it, one for the aborted and one for the preempted, two aborts, one preemption.
    assert 6 <= row.changes_per_step <= 8


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
