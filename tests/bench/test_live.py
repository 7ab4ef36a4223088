"""Policies by the real clock, on a tiny model: jobs end where they say, and every case yields its claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from headway.backends.cpu import load_model
from headway.bench.live import Live, WallClock, random_prompt
from headway.bench.policy import live_harm, live_itl, live_order, rounds, run
from headway.bench.policy.claim import Claim
from headway.bench.setup import ModelSetup
from headway.bench.virtual import Job
from headway.cli.main import main
from headway.errors import ConfigError


def _live(setup: ModelSetup) -> Live:
    loaded = load_model(setup.config())
    return Live(loaded, random_prompt(1, loaded.spec.vocab_size))


def test_a_job_ends_where_it_says_and_nobody_knew(setup: ModelSetup) -> None:
    jobs = [Job(0.01 * i, 5 + i, 3 + 2 * i, max_tokens=60) for i in range(8)] + [Job(0.0, 9, 60, max_tokens=60)]
    records = _live(setup).serve(jobs, setup.config(max_num_seqs=4, num_blocks=64, prefix_caching=False)).records
    assert all(record.num_tokens == record.job.num_output for record in records)
    assert {record.finish for record in records} == {"stop"}
    assert all(record.job.at < record.first <= record.last <= record.end for record in records)


def test_a_job_that_was_sent_back_ends_where_it_says(setup: ModelSetup) -> None:
    jobs = [Job(0.0, 30, 40 + i, max_tokens=80) for i in range(6)]
    done = _live(setup).serve(jobs, setup.config(max_num_seqs=6, num_blocks=14, prefix_caching=False))
    assert done.preemptions
    assert [record.num_tokens for record in done.records] == [job.num_output for job in jobs]
    assert done.generated == sum(job.num_output for job in jobs)


def test_a_clock_that_cannot_be_stopped_is_not_waited_for_in_vain() -> None:
    clock = WallClock()
    clock.advance(-1.0)
    assert 0.0 <= clock.now() < 1.0


def test_prompts_carry_words_that_mostly_tell() -> None:
    prompt = live_order.Prompts(0, 49_152)
    for length, words in live_order.WORDS.items():
        said = [sum(token in words for token in prompt(id, Job(0.0, 30, length))) for id in range(200)]
        assert 0.8 < sum(said) / (200 * live_order.HINTS) < 0.95


def _is_told(claims: list[Claim]) -> bool:
    return all(math.isfinite(claim.value) and claim.value > 0 for claim in claims)


def test_order_compares_every_setup(setup: ModelSetup) -> None:
    claims = list(live_order.order(setup, seed=0, rounds=1, count=20))
    assert len(claims) == 6
    assert _is_told(claims)


def test_itl_and_harm_yield_their_claims(setup: ModelSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (live_itl, "SECONDS", 0.5), (live_itl, "QUIET", 0.2), (live_itl, "BUSY", 1.0), (live_itl, "SETTLED", 0.5),
        (live_itl, "WINDOW", 0.2), (live_itl, "STREAM", 0.5), (live_itl, "LONG", 400), (live_harm, "SECONDS", 0.3),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    assert len(list(live_itl.itl(setup, seed=0, rounds=1))) == 10
    assert _is_told(list(live_harm.harm(setup, seed=0, rounds=1)))


def test_the_command_line_runs_a_real_case(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, last_line: Callable[[], dict[str, Any]]
) -> None:
    monkeypatch.setattr(live_harm, "SECONDS", 0.2)
    command = ["bench", "policy", "--clock", "real", "--case", "harm", "--rounds", "1", "--json"]
    assert main([*command, *flags], {}) in (0, 1)  # what it says of a tiny model on a busy machine is no promise
    assert last_line()["clock"] == "real"


def test_a_model_means_nothing_to_the_virtual_clock(setup: ModelSetup) -> None:
    with pytest.raises(ConfigError, match="add --clock real"):
        run.run(["fixture"], setup=setup)


def test_a_ratio_is_the_median_of_rounds() -> None:
    found: rounds.Rounds[float] = rounds.Rounds(("a", "b"))
    for name, value in zip(found.turns(3), (2.0, 1.0, 9.0, 3.0, 8.0, 2.0), strict=True):
        found.add(name, value)
    assert rounds.ratio(found["a"], found["b"], float) == 3.0
    assert rounds.median(found["a"], float) == 8.0
