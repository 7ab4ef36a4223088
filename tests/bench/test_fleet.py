"""Many engines under a virtual clock: the same every time, and what routes are worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.bench.fleet import FleetSetup, made_up, read_trace, run, simulate_fleet
from headway.cluster.routes._route import load_route
from headway.errors import ConfigError

SETUP = FleetSetup(num_replicas=4, num_blocks=400)


def test_equal_arrivals_give_equal_reports() -> None:
    arrivals = made_up(60, 8.0, 1, num_prefixes=8)
    one, two = (simulate_fleet(arrivals, SETUP, load_route("cost")) for _ in range(2))
    assert one == two
    assert one.num_requests == len(one.ttfts) == 60
    assert one.num_prompt == 60 * 4096


def test_requests_that_share_a_prefix_reach_a_replica_that_holds_it() -> None:
    arrivals = made_up(250, 8.0, 2, num_prefixes=8)
    cost = simulate_fleet(arrivals, SETUP, load_route("cost"))
    turns = simulate_fleet(arrivals, SETUP, load_route("round_robin"))
    assert cost.reached >= 0.98
    assert cost.hit_ratio > turns.hit_ratio
    assert cost.skew < 1.3


def test_in_quiet_the_route_knows_what_is_cached() -> None:
    report = simulate_fleet(made_up(60, 0.3, 3, num_prefixes=4), SETUP, load_route("cost"))
    assert report.num_quiet > 40
    assert report.num_wrong == 0


def test_news_that_come_late_are_noticed() -> None:
    """What the quiet count is good for: with news of another engine withheld, the route expects too little."""
    late = FleetSetup(num_replicas=1, num_blocks=400, delay=1e9)
    report = simulate_fleet(made_up(40, 0.3, 3, num_prefixes=2), late, load_route("cost"))
    assert report.num_quiet <= 1
    assert report.num_repeated == 0


def test_a_trace_is_read_and_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"timestamp": 1000 * at, "input_length": 1000, "output_length": 5, "hash_ids": [0, at]} for at in range(6)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, *_ = read_trace(path, speed=2.0)
    assert (first.blocks, first.num_prompt, first.num_output) == ([0, 0], 1000, 5)
    assert [arrival.at for arrival in read_trace(path, speed=2.0)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert run(trace=path, replicas=2, speed=1.0, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["route"] for row in rows] == ["cost", "least_loaded", "round_robin"]
    assert rows[0]["hit_ratio"] > rows[2]["hit_ratio"]
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match=r"line 1 is no request of a trace"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match=r"cannot be read"):
        run(trace=tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"replicas 0.*allowed: 1 or more"):
        run(replicas=0)
