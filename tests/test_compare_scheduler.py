"""`tools/compare_scheduler.py`: two trees take turns, and a policy that became slower is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

import compare_scheduler
from compare_scheduler import Configuration, by_policy, ratios

SRC = Path(__file__).parent.parent / "src"
SMALL, LARGE = Configuration("fcfs", 256, 100), Configuration("fcfs", 1000, 100)


def test_a_ratio_is_the_median_of_rounds_and_a_policy_the_median_of_its_configurations() -> None:
    old = [{SMALL: 100.0, LARGE: 400.0}, {SMALL: 200.0, LARGE: 400.0}, {SMALL: 100.0, LARGE: 400.0}]
    new = [{SMALL: 110.0, LARGE: 200.0}, {SMALL: 600.0, LARGE: 800.0}, {SMALL: 100.0, LARGE: 200.0}]
    found = ratios(old, new)
    assert found == {SMALL: pytest.approx(1.1), LARGE: pytest.approx(0.5)}
    assert by_policy(found) == {"fcfs": pytest.approx(0.8)}


def test_trees_are_measured_apart_and_the_status_reports_a_slower_one(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "1", "--steps", "20", "--policy", "sjf", "--running", "16", "--queue", "20"]
    assert compare_scheduler.main([str(SRC), str(SRC), *small, "--most", "100"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["sjf", "16", "20"]
    assert compare_scheduler.main([str(SRC), str(SRC), *small, "--most", "0.001"]) == 1
    assert "SLOWER" in capsys.readouterr().out
