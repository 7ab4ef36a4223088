"""The parts of a simulated fleet by themselves: cells, links, traces, the command."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from headway.bench.fleet.arrivals import read_trace
from headway.bench.fleet.cell import Cell, CellEvents
from headway.bench.fleet.cells import CellChoice
from headway.bench.fleet.links import Lane, PeerBlocks, TierBlocks
from headway.bench.fleet.node import NodeSetup
from headway.bench.fleet.scale import HeldTarget, ScaleSetup, add_up
from headway.bench.route import bytes_per_key, measure
from headway.cli.main import main
from headway.cluster.routes._route import load_route
from headway.cluster.scaling import ClusterLoad, ScaleRule
from headway.engine.client import Submit
from headway.engine.clock import VirtualClock
from headway.errors import ConfigError
from headway.values.params import SamplingParams

KEYS = [bytes([at]) * 32 for at in range(8)]


def test_a_choice_takes_time_and_a_key_of_the_index_some_bytes() -> None:
    assert measure(load_route("cost"), 4, 3, 0).microseconds > 0
    assert 16 < bytes_per_key(8, 0, 2_000) < 1_000
    with pytest.raises(ConfigError, match=r"0 replicas and 3 blocks; allowed: 1 or more of each"):
        measure(load_route("cost"), 0, 3, 0)


def test_a_number_of_replicas_changes_when_it_was_wanted_all_the_time() -> None:
    setup = ScaleSetup(1, 4, ScaleRule(10.0, 1.0), up_s=2.0, down_s=5.0)
    target = HeldTarget(setup, 2)
    busy, quiet, calm = (ClusterLoad(num, 0.0, 2, 64) for num in (100, 1, 20))
    assert [target.look(float(now), busy) for now in (0, 1)] == [2, 2]
    assert target.look(1.5, calm) == 2  # once it was not wanted
    assert [target.look(float(now), busy) for now in (2, 3, 4)] == [2, 2, 4]
    assert [target.look(float(now), quiet) for now in (5, 9)] == [4, 4]
    assert target.look(9.5, busy) == 4
    assert [target.look(float(now), quiet) for now in (10, 14, 15)] == [4, 4, 1]
    both = add_up([ClusterLoad(3, 1.0, 1, 64), ClusterLoad(5, 0.0, 3, 32)], 2)
    assert both == ClusterLoad(10, 0.25, 4, 32)
    with pytest.raises(ConfigError, match=r"scale is 3:2; allowed"):
        ScaleSetup(3, 2, ScaleRule(1.0, 1.0))
    with pytest.raises(ConfigError, match=r"per-replica -1.0"):
        ScaleSetup(1, 2, ScaleRule(-1.0, 1.0))


def test_a_prefix_has_a_cell_and_cells_have_about_as_many_prefixes() -> None:
    choice, idle = CellChoice(8, 2, 0.0), [0.0] * 8
    chosen = Counter(choice.choose([prefix, 7, 1], idle) for prefix in range(4_000))
    assert all(400 < chosen[cell] < 600 for cell in range(8))
    assert choice.choose([5, 7, 1], idle) == choice.choose([5, 7, 2], [9.0] * 8)
    assert len({choice.choose([5, other], idle) for other in range(50)}) > 1
    assert CellChoice(1, 2, 1.25).choose([1], [9.0]) == 0


def test_with_one_cell_more_only_its_own_prefixes_move() -> None:
    before, after = CellChoice(8, 1, 0.0), CellChoice(9, 1, 0.0)
    places = [(before.choose([at], [0.0] * 8), after.choose([at], [0.0] * 9)) for at in range(2_000)]
    assert all(one == two or two == 8 for one, two in places)
    assert 100 < sum(one != two for one, two in places) < 350


def test_a_busy_cell_gives_requests_to_one_other_cell() -> None:
    choice, rng = CellChoice(8, 1, 1.25), random.Random(0)
    for prefix in range(50):
        first = choice.choose([prefix], [10.0] * 8)
        busy = [10.0] * 8
        busy[first] = 100.0
        second = choice.choose([prefix], busy)
        assert second != first
        assert {
            choice.choose([prefix], [*busy[:first], rng.uniform(50, 90), *busy[first + 1 :]]) for _ in range(9)
        } == {second}
        busy[second] = 101.0
        assert choice.choose([prefix], busy) == first
        gone = [10.0] * 8
        gone[first] = float("inf")
        assert choice.choose([prefix], gone) == CellChoice(8, 1, 0.0).choose([prefix], gone) == second
    assert CellChoice(8, 1, 0.0).choose([1], busy) == CellChoice(8, 1, 0.0).choose([1], [0.0] * 8)
    assert choice.choose([1], [float("inf")] * 8) == choice.choose([1], [0.0] * 8)


def test_what_a_lane_carries_at_the_same_time_waits() -> None:
    lane, other = Lane(100.0, latency_s=0.5), Lane(50.0)
    assert lane.carry(1.0, 200) == 3.5
    assert lane.carry(1.0, 100) == 4.5
    assert lane.carry(9.0, 100) == 10.5
    assert lane.carry(9.0, 100, other) == 12.5  # from 10.0 on, as fast as the slower one
    assert other.carry(9.0, 50) == 13.0
    assert lane.busy_s == 6.0


def test_blocks_of_a_peer_come_one_after_the_other_and_then_the_end() -> None:
    clock, out = VirtualClock(), Lane(1e9)
    asked: list[str] = []

    def look_up(name: str, keys: list[bytes]) -> tuple[int, Lane]:
        asked.append(name)
        return min(2, len(keys)), out

    peers = PeerBlocks(clock, b"data", 100, Lane(100.0), look_up)  # type: ignore[arg-type]
    peers.load(1, KEYS[:4], "engine-3")
    peers.load(2, KEYS[4:5], "engine-4")
    assert asked == ["engine-3", "engine-4"]
    assert (peers.has_arrivals, peers.next_time) == (False, 1.0)
    clock.advance(2.0)
    assert [(each.ticket, each.place, each.data) for each in peers.take(9)] == [
        (1, 0, b"data"),
        (1, 1, b"data"),
        (1, 2, None),
    ]
    peers.cancel(2)
    clock.advance(9.0)
    assert not peers.has_arrivals


def test_a_tier_keeps_what_was_used_last() -> None:
    clock = VirtualClock()
    tier = TierBlocks(clock, b"data", 100, Lane(100.0), num_blocks=3)
    for key in KEYS[:3]:
        assert tier.wants(key, 100)
        tier.store(key, memoryview(b"data"))
    assert not tier.wants(KEYS[0], 100)
    assert tier.num_held(KEYS) == 3
    tier.load(1, KEYS[:1])
    tier.store(KEYS[5], memoryview(b"data"))
    assert [tier.num_held([key]) for key in KEYS[:6]] == [1, 0, 1, 0, 0, 1]
    tier.load(2, KEYS[3:4])
    clock.advance(1.0)
    assert [(each.ticket, each.data) for each in tier.take(9)] == [(2, None), (1, b"data"), (1, None)]


def write_lines(path: Path) -> Path:
    lines = [{"timestamp": 1000 * at, "input_length": 1000, "output_length": 5, "hash_ids": [0, at]} for at in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_both_kinds_of_traces_are_read_as_they_are(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl")
    first, second, *_ = read_trace(path, speed=2.0)
    assert (first.blocks, first.num_prompt, first.num_output) == ([0, 0], 1000, 5)
    assert second.tokens() == [0] * 512 + [1] * 488
    assert [arrival.at for arrival in read_trace(path, speed=2.0)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert len(list(read_trace(path, most=4))) == 4
    table = tmp_path / "trace.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,700,109"
    )
    one, two = read_trace(table)
    assert (one.at, one.num_prompt, one.num_output) == (0.0, 374, 44)
    assert two.at == pytest.approx(4.314579)
    assert len(two.tokens()) == 700
    assert not set(one.blocks) & set(two.blocks)


ENTRY = '{"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"timestamp": 0}\n', r"line 1 is no request of a trace: KeyError"),
        ("a.jsonl", ENTRY.replace('": 0', '": 1e400'), r"line 1 comes at inf ms; allowed: 0 to 1e\+10"),
        ("a.jsonl", ENTRY.replace('": 0', '": NaN'), r"line 1 comes at nan ms"),
        ("a.jsonl", ENTRY.replace('": 0', '": -1'), r"line 1 comes at -1 ms"),
        ("a.jsonl", ENTRY.replace("[1]", "[1e400]"), r"line 1 is no request of a trace: OverflowError"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}\n', r"has no prompt"),
        ("a.csv", "when,what\n", r"begins with 'when,what'; allowed: TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3\n", r"line 2 is no request"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,0\n", r"line 2 has no prompt or no"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(read_trace(path))


def test_the_command_prints_equal_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write_lines(tmp_path / "trace.jsonl"))
    flags = ["simulate", "--replicas", "2", "--trace", trace, "--slo", "ttft=2s,tpot=100ms"]
    outputs = []
    for _ in range(2):
        assert main([*flags, "--route", "cost", "--route", "round_robin", "--json"], {}) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    rows = json.loads(outputs[0])["rows"]
    assert [row["route"] for row in rows] == ["cost", "round_robin"]
    assert rows[0]["hit_ratio"] > rows[1]["hit_ratio"]
    assert rows[0]["attainment"] == 1.0
    assert main([*flags[:5], "--scale", "1:3", "--fail", "1:50%"], {}) == 0
    out = capsys.readouterr().out
    assert "longest_pause_s" in out
    assert "predicted wait" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "0"], "replicas is 0; allowed: 1 to 4096"),
        (["--slo", "ttft=2"], "slo has 'ttft=2'; allowed: ttft=2s"),
        (["--fail", "soon"], "fail is 'soon'; allowed: SECONDS:NUMBER"),
        (["--fail", "3:2"], "fail is '3:2'"),
        (["--scale", "many"], "scale is 'many'; allowed: FEWEST:MOST"),
        (["--scale", "2:4"], "replicas is 1, outside of scale 2:4"),
        (["--workload", "chat"], "workload is 'chat'; allowed: shared-prefix, unique"),
        (["--route", "nearest"], "no cluster.routes named 'nearest'"),
        (["--trace", "missing.jsonl"], "trace missing.jsonl cannot be read"),
        (["--blocks", "32", "--prompt-tokens", "20000"], "blocks is 32, 16384 tokens, and the longest request has"),
        (["--speed", "0", "--trace", "missing.jsonl"], "speed of a trace is 0"),
    ],
)
def test_bad_options_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags], {}) == 2
    assert said in capsys.readouterr().err


def test_a_machine_that_goes_silent_in_a_step_makes_no_suspects() -> None:
    """It is away: nothing says that its step stands still, or that a request ended it."""
    ended: list[int] = []
    events = CellEvents(lambda id, now: None, lambda id, since: None, lambda output, count, now: ended.append(count))
    cell = Cell(0, NodeSetup(num_blocks=64), load_route("cost"), events)
    nodes = [cell.join(name) for name in ("one", "two")]
    replica = cell.front.start(Submit(1, [1] * 600, SamplingParams(max_tokens=900)))
    lost = next(node for node in nodes if node.name == replica.engine.name)
    for beat in range(1, 60):
        cell.advance(beat / 4)
        cell.beat(0.25)
        if beat == 3:
            assert lost.alive().is_working
            cell.advance(0.9)  # it says more after its last beat
            cell.lose(lost)
        if beat == 12:
            assert replica.health == "away"
        assert 1 not in cell.front._ward
    assert ended == [900]
