"""`bench offline` and `bench paging` on a tiny model: what they promise to print, and that every engine agrees."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from headway.backends.cpu import load_model
from headway.bench import machine, offline
from headway.bench.baseline import room_per_slot
from headway.bench.offline import OfflineJob, open_engine, static_slots
from headway.bench.setup import ModelSetup, pool_blocks
from headway.bench.workload import WorkItem, fit, uniform
from headway.cli.main import main
from headway.errors import ConfigError

Last = Callable[[], dict[str, Any]]

PROMISED = {"engine", "n", "s", "in_tok", "out_tok", "out_tok_s", "limit_tok_s", "dtype", "kv_dtype", "kernels"}
PROMISED |= {"threads", "steps", "seed", "peak_rss_mb", "workload", "slots", "peak_gflops", "read_gb_s"}


def test_offline_ends_with_everything_it_promises(setup: ModelSetup, last_line: Last) -> None:
    assert offline.run(setup, requests=4, seed=1, engine="continuous,static2", rounds=2, as_json=True) == 0
    record = last_line()
    assert record.keys() >= PROMISED
    assert (record["engine"], record["n"], record["slots"], record["workload"]) == ("continuous", 4, 4, "chat-mix")
    assert record["out_tok_s"] == pytest.approx(record["out_tok"] / record["s"], rel=0.01)
    rows = record["rows"]
    assert rows[1]["first_is"] == pytest.approx(rows[1]["s"] / rows[0]["s"], rel=0.05)
    assert [(row["engine"], len(row["runs_s"])) for row in rows] == [("continuous", 2), ("static2", 2)]


def test_offline_runs_from_the_command_line(flags: list[str], last_line: Last) -> None:
    command = ["bench", "offline", "--workload", "uniform", "--requests", "3", "--slots", "2", "--contiguous"]
    assert main([*command, "--json", *flags], {}) == 0
    record = last_line()
    assert (record["n"], record["slots"], record["contiguous"]) == (3, 2, True)
    assert record["block_size"] == 128  # 30 in, up to 90 out, whole


@pytest.mark.parametrize("engine", ["naive", "static3", "static8"])
def test_static_engines_give_the_tokens_of_continuous_batching(setup: ModelSetup, engine: str) -> None:
    lengths = [(5, 4), (17, 9), (1, 12), (9, 1), (33, 6), (2, 2), (40, 20)]
    works = fit([WorkItem(list(range(n, 2 * n)), out) for n, out in lengths], 260, 512)
    job = OfflineJob(works, slots=4)
    config = job.config(setup)
    loaded = load_model(config)
    answers = {}
    for name in ("continuous", engine):
        with closing(open_engine(name, job, config, loaded)) as opened:
            answers[name] = opened.answer(works, lambda done: None).tokens
    assert answers[engine] == answers["continuous"]
    assert [len(tokens) for tokens in answers[engine]] == [out for _, out in lengths]


def test_a_static_batch_takes_as_many_steps_as_its_longest_answer(setup: ModelSetup) -> None:
    works = fit([WorkItem([1] * 10, out) for out in (3, 9, 2, 5)], 260, 512)
    job = OfflineJob(works, slots=4)
    config = job.config(setup)
    with closing(open_engine("static2", job, config, load_model(config))) as opened:
        assert opened.answer(works, lambda done: None).steps == 9 + 5
    assert room_per_slot(works, 2) == 10 + 9


def test_the_pool_holds_everybody_admitted() -> None:
    works = [WorkItem([1] * 16, 16), WorkItem([1] * 10, 7), WorkItem([1], 1)]
    assert pool_blocks(works, slots=2, block_size=16) >= 4
    assert pool_blocks(works, slots=2, block_size=16) < pool_blocks(uniform(40), slots=32, block_size=16)


def test_unknown_engines_and_counts_are_refused_before_anything_is_loaded() -> None:
    assert [static_slots(name) for name in ("naive", "static8", "continuous")] == [1, 8, None]
    with pytest.raises(ConfigError, match="static8"):
        offline.run(ModelSetup(model="/nowhere"), engine="dynamic")
    with pytest.raises(ConfigError, match="requests is 0"):
        offline.run(ModelSetup(model="/nowhere"), requests=0)


def test_paging_prints_the_ratio(flags: list[str], last_line: Last) -> None:
    assert main(["bench", "paging", "--tokens", "20", "--rounds", "1", "--json", *flags], {}) == 0
    record = last_line()
    medians = (record["paged_ms"], record["contiguous_ms"])
    assert record["ratio"] == pytest.approx(medians[0] / medians[1], rel=0.01)


def test_peak_memory_sees_what_was_touched() -> None:
    machine.forget_peak_memory()
    before = machine.peak_memory()
    with mmap.mmap(-1, 80_000_000) as fresh:  # a bytearray may get what the process has anyway
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert machine.peak_memory() >= before + 60_000_000
