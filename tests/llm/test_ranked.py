"""`LLM` with policy ltr: it learns from its own answers, says so to the scheduler, and changes no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.engine.client import Submit
from headway.errors import ConfigError
from headway.rank.log import read_log
from tiny_dir import tiny_options


def test_lengths_are_learned_kept_and_passed_on_and_tokens_stay_the_same(folder: Path, tmp_path: Path) -> None:
    """Prompts with word 8 end at once, by a bias the ranker cannot see; those with word 9 go on to the limit."""
    state = tmp_path / "ranker.npz"
    goes_on = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=[5])
    ends = replace(goes_on, logit_bias={5: 100.0})
    prompts = [[9 if number % 2 else 8, 20 + number % 50, 30 + number % 7] for number in range(300)]
    params = [goes_on if prompt[0] == 9 else ends for prompt in prompts]
    with LLM(**tiny_options(folder)) as plain:  # type: ignore[arg-type]
        wanted = [done.outputs[0].token_ids for done in plain.generate(prompts, params)]
    with LLM(**tiny_options(folder, policy="ltr", rank_state=str(state))) as llm:  # type: ignore[arg-type]
        assert [done.outputs[0].token_ids for done in llm.generate(prompts, params)] == wanted
        assert llm._forecast is not None
        assert not llm._forecast._open, "every request was learned from"
    told: list[Submit] = []
    with LLM(**tiny_options(folder, policy="ltr", rank_state=str(state))) as llm:  # type: ignore[arg-type]
        add = llm._engine.add
        llm._engine.add = lambda submit: (told.append(submit), add(submit))[1]  # type: ignore[method-assign]
        llm.generate([[9, 21, 31], [8, 21, 31]], goes_on)
    long, short = told
    assert 0 < short.expected < 3
    assert long.expected > 6
    assert long.ceiling == 12


def test_a_stream_left_early_is_learned_from_too(folder: Path) -> None:
    with LLM(**tiny_options(folder, policy="ltr")) as llm:  # type: ignore[arg-type]
        stream = llm.stream_chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        assert llm._forecast is not None
        assert len(llm._forecast._open) == 1
        stream.close()  # type: ignore[attr-defined]
        assert not llm._forecast._open


def test_a_policy_that_learns_nothing_has_no_ranker(folder: Path, tmp_path: Path) -> None:
    with LLM(**tiny_options(folder, policy="sjf", rank_state=str(tmp_path / "x.npz"))) as llm:  # type: ignore[arg-type]
        assert llm._forecast is None


def test_a_state_that_is_none_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("no")
    with pytest.raises(ConfigError, match="is not a ranker's state"):
        LLM(**tiny_options(folder, policy="ltr", rank_state=str(tmp_path / "x.npz")))  # type: ignore[arg-type]


def test_every_answer_is_in_the_request_log(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with LLM(**tiny_options(folder, rank_log=str(log))) as llm:  # type: ignore[arg-type]
        llm.generate([[9, 20], [8, 21, 30]], params)
    assert [(entry.tokens, entry.num_output, entry.finish) for entry in read_log(log)] == [
        ([9, 20], 5, "length"),
        ([8, 21, 30], 5, "length"),
    ]
    with pytest.raises(ConfigError, match="cannot write the request log"):
        LLM(**tiny_options(folder, rank_log=str(tmp_path)))  # type: ignore[arg-type]
