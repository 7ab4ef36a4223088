"""A request that another engine has begun goes on exactly: same tokens, same log probabilities, same end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from exact_kit import Told, collect
from headway.build import build_engine, load
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.engine.journal import OpenRequest
from headway.errors import Overloaded, RequestError
from headway.serve.explain import words
from headway.values.params import SamplingParams, Slo
from tiny_dir import tiny_options, write_tiny_model

PROMPT = [70, 101, 108, 108, 111, 44, 32, 119, 104, 111, 32, 97, 114, 101, 32, 121, 111, 117, 63]
CASES = {
    "greedy": SamplingParams(max_tokens=20, temperature=0.0),
    "sampled": SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, top_k=40),
    "presence": SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=1.7),
    "frequency": SamplingParams(max_tokens=20, temperature=0.9, frequency_penalty=1.9),
    "repetition": SamplingParams(max_tokens=20, temperature=0.8, repetition_penalty=1.4),
    "logprobs": SamplingParams(max_tokens=20, temperature=0.7, logprobs=3),
    "least": SamplingParams(max_tokens=20, min_tokens=15, temperature=1.0, stop_token_ids=tuple(range(0, 260, 5))),
    "stops": SamplingParams(max_tokens=200, temperature=1.5, stop_token_ids=tuple(range(0, 260, 17))),
    "bias": SamplingParams(max_tokens=20, temperature=1.0, logit_bias={40: 3.0, 41: -5.0}, min_p=0.01),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder


def build(folder: Path, **changes: object) -> Engine:
    config = EngineConfig.of(**tiny_options(folder, **changes))
    return build_engine(config, load(config))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    built = build(folder)
    yield built
    built.close()


def run(engine: Engine, *submits: Submit) -> Told:
    """Tokens, log probabilities and terminal output of each."""
    for submit in submits:
        if submit.id not in engine.scheduler.state.live:
            engine.add(submit)
    return collect(engine, [submit.id for submit in submits])


def cut(submit: Submit, tokens: list[int]) -> Submit:
    entry = OpenRequest(submit, 0.0)
    entry.tokens = tokens
    return entry.resubmission(1.0)


@pytest.mark.parametrize("name", CASES)
def test_from_every_token_on_the_rest_is_the_same(engine: Engine, name: str) -> None:
    submit = Submit(1, PROMPT, CASES[name], seed=4711)
    tokens, logprobs, end = run(engine, submit)[1]
    assert len(tokens) > 3, "the case tests nothing"
    for at in range(len(tokens)):
        rest, rest_logprobs, rest_end = run(engine, cut(submit, tokens[:at]))[1]
        assert tokens[:at] + rest == tokens
        assert logprobs[:at] + rest_logprobs == logprobs if logprobs else not rest_logprobs
        assert rest_end.finish == end.finish
        assert rest_end.cached_tokens <= len(PROMPT)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "srpt"},
        {"policy": "mlfq"},
        {"policy": "lpm"},
        {"policy": "edf", "fair": True},
        {"policy": "slo", "num_blocks": 40},
        {"batching": "static:4"},
        {"depth": 2, "num_blocks": 40, "kv_dtype": "int8", "kv_admission": "peak"},
        {"prefix_caching": False, "max_chunk_tokens": 5},
    ],
    ids=str,
)
def test_many_together_that_were_cut_anywhere_go_on_whatever_the_policy(
    folder: Path, options: dict[str, object]
) -> None:
    draw = random.Random(5)
    engine = build(folder, **options)
    submits = []
    for id in range(24):
        prompt = PROMPT[: draw.randrange(1, 19)] + [draw.randrange(40, 120) for _ in range(draw.randrange(20))]
        params = draw.choice([CASES[name] for name in ("greedy", "sampled", "presence", "frequency", "stops", "least")])
        parent = submits[-1].id if submits and draw.random() < 0.3 else None
        tokens = submits[-1].tokens if parent is not None else prompt
        submits.append(Submit(id, tokens, params, seed=id % 5, parent=parent))
    whole = run(engine, *submits)
    assert engine.stats().blocks_free == engine.stats().blocks_total
    resumed = []
    for submit in submits:
        tokens = whole[submit.id][0]
        resumed.append(cut(submit, tokens[: draw.randrange(len(tokens))]))
    rest = run(engine, *resumed)
    for submit in resumed:
        given = list(submit.tokens[submit.num_prompt :]) if submit.num_prompt else []
        assert given + rest[submit.id][0] == whole[submit.id][0]
        assert rest[submit.id][2].finish == whole[submit.id][2].finish
    assert engine.stats().blocks_free == engine.stats().blocks_total
    engine.close()


def test_a_resumed_request_is_taken_when_the_queue_is_full_and_no_objective_turns_it_away(folder: Path) -> None:
    engine = build(folder, max_waiting=1)
    slo = Slo(ttft=1e-6)
    first = Submit(1, PROMPT, CASES["greedy"])
    engine.add(first)
    with pytest.raises(Overloaded):
        engine.add(Submit(2, PROMPT, CASES["greedy"]))
    assert run(engine, first, cut(Submit(3, PROMPT, CASES["greedy"], slo=slo), []))[3][2].finish == "length"
    engine.close()


def test_its_time_in_a_slot_is_decoding_and_its_parts_make_the_total(engine: Engine) -> None:
    timing = run(engine, cut(Submit(1, PROMPT, CASES["greedy"]), PROMPT[:3]))[1][2].timing
    assert timing is not None
    assert timing.prefill_s == 0
    assert math.isclose(timing.queued_s + timing.decode_s, timing.total_s)


def test_its_explanation_says_that_it_was_resumed_and_takes_no_decoding_for_prefill(engine: Engine) -> None:
    first = Submit(901, PROMPT, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    tokens = run(engine, first)[901][0]
    run(engine, replace(cut(first, tokens[:100]), id=902))
    told = engine.explain(902)
    assert told is not None
    assert told.is_resumed
    assert "prefill" not in told.parts_s
    assert told.ttft_s is None
    assert told.num_cached <= told.num_prompt == len(PROMPT)
    assert sum(told.parts_s.values()) == pytest.approx(told.total_s, abs=1e-6)
    said = words(told)
    assert "engine" in said[0]
    assert not any("first token" in sentence for sentence in said)


@pytest.mark.parametrize("num_prompt", [-1, 20, 25])
def test_a_prompt_longer_than_the_tokens_or_output_beyond_its_limit_is_refused(engine: Engine, num_prompt: int) -> None:
    with pytest.raises(RequestError, match="num_prompt is"):
        engine.add(Submit(1, PROMPT, SamplingParams(max_tokens=5), num_prompt=num_prompt))
    with pytest.raises(RequestError, match="num_prompt is 10 of 19 tokens"):
        engine.add(Submit(1, PROMPT, SamplingParams(max_tokens=5), num_prompt=10))


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [([5], None), ([5, 9], "stop"), ([5, 0], "stop"), ([5, 6, 7], "length"), ([5, 6, 9], "stop"), ([0, 5], None)],
)
def test_an_answer_that_is_complete_is_known_to_be(tokens: list[int], finish: str | None) -> None:
    entry = OpenRequest(Submit(1, [1], SamplingParams(max_tokens=3, stop_token_ids=(9,))), 0.0, tokens)
    assert entry.finish((0,)) == finish


def test_tokens_that_end_an_answer_do_not_where_they_are_ignored() -> None:
    entry = OpenRequest(Submit(1, [1], SamplingParams(max_tokens=3, ignore_eos=True)), 0.0, [5, 0])
    assert entry.finish((0,)) is None


@pytest.mark.parametrize("tokens", [[], [7, 8]])
def test_a_resumed_request_is_the_same_tenants_in_the_same_namespace(tokens: list[int]) -> None:
    first = Submit(
        5, PROMPT, CASES["greedy"], 9, "salt", -3, None, "ann", "batch", "chat", Slo(ttft=1.0), 4.0, 8.0, b"hers", "", 5
    )
    again = cut(first, tokens)
    changed = {"tokens", "num_prompt", "slo", "is_resumed"}
    kept = [field.name for field in fields(Submit) if field.name not in changed]
    assert {name: getattr(again, name) for name in kept} == {name: getattr(first, name) for name in kept}
    assert again.tokens == [*PROMPT, *tokens]
