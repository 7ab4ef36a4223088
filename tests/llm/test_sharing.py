"""Sharing on the real engine, counted in computed tokens from the step log, at depth 1 and 2."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from tiny_dir import write_tiny_model

PREFIX = [(7 * i) % 250 for i in range(1000)]
Steps = Callable[[], list[dict[str, int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_len=2048)
    return folder


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def engine(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[tuple[LLM, Steps]]:
    log = tmp_path / "steps.jsonl"
    with LLM(
        str(folder), cache_dir=str(folder / "cache"), num_blocks=600, threads=1, depth=request.param, step_log=str(log)
    ) as llm:

        def steps() -> list[dict[str, int]]:
            events = [json.loads(line) for line in log.read_text().splitlines()]
            return [event for event in events if event["event"] == "Stepped"]

        yield llm, steps


def _params(max_tokens: int = 3, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **more)  # type: ignore[arg-type]


def _computed(steps: list[dict[str, int]]) -> int:
    return sum(step["num_computed"] for step in steps)


def test_a_second_request_computes_only_its_suffix(engine: tuple[LLM, Steps]) -> None:
    llm, steps = engine
    llm.generate([[*PREFIX, 1]], _params())
    before = _computed(steps())
    (second,) = llm.generate([[*PREFIX, 2, 3]], _params())
    assert second.num_cached == 992
    assert _computed(steps()) - before == (1002 - 992) + 2


def test_four_answers_compute_the_prompt_once_and_copy_three_blocks(engine: tuple[LLM, Steps]) -> None:
    llm, steps = engine
    params = SamplingParams(max_tokens=5, n=4, seed=3, ignore_eos=True)
    (completion,) = llm.generate([PREFIX[:100]], params)
    assert _computed(steps()) == 100 + 4 * 4
    assert sum(step["num_copies"] for step in steps()) <= 3
    alone = llm.generate([PREFIX[:100]], SamplingParams(max_tokens=5, seed=3, ignore_eos=True))
    assert alone[0].outputs[0] == completion.outputs[0]


def test_eight_arrivals_in_one_step_compute_their_prefix_once_and_a_quarter_at_most(
    engine: tuple[LLM, Steps],
) -> None:
    llm, steps = engine
    answers = llm.generate([[*PREFIX, i, i + 1] for i in range(8)], _params())
    prefix = _computed(steps()) - 8 * (2 + 2)
    assert prefix <= 1250
    for i in (0, 7):
        alone = llm.generate([[*PREFIX, i, i + 1]], _params())
        assert alone[0].outputs == answers[i].outputs


def test_a_prompt_cached_whole_recomputes_one_token_and_copies_the_block_it_writes(engine: tuple[LLM, Steps]) -> None:
    llm, steps = engine
    (first,) = llm.generate([PREFIX[:960]], _params())
    before, copies = _computed(steps()), sum(step["num_copies"] for step in steps())
    (again,) = llm.generate([PREFIX[:960]], _params())
    assert again.num_cached == 959
    assert _computed(steps()) - before == 1 + 2
    assert sum(step["num_copies"] for step in steps()) - copies == 1
    assert again.outputs == first.outputs
