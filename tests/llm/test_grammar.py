"""Answers held to a grammar: each follows it, with the same tokens whatever the company and the way to compute it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.engine.client import Submit
from headway.errors import Overloaded, RequestError
from headway.grammar import source
from tiny_dir import tiny_options

SCHEMA = {
    "type": "object",
    "properties": {
        "hello": {"enum": ["hello world", "held"]},
        "well": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["hello", "well"],
    "additionalProperties": False,
}
GRAMMARS = [
    source.json_schema(SCHEMA),
    source.regex("(hello|held) [a-d]{2,6}!"),
    source.choice(["hello, hello, hello", "hello, world"]),
    source.lark('start: "(" start ")" | "hello"'),
]
WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "n": 3},
    {"temperature": 0.9, "seed": 6, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2},
]
JOBS = [
    ("hello " * (2 + 4 * at), SamplingParams(max_tokens=60, grammar=grammar, **way))  # type: ignore[arg-type]
    for at, (grammar, way) in enumerate((grammar, way) for grammar in GRAMMARS for way in WAYS)
]
FREE = [("hello world " * 3, SamplingParams(max_tokens=50, temperature=t, seed=2, ignore_eos=True)) for t in (0.0, 1.0)]
Answers = list[list[tuple[list[int], object, str]]]


def answers(llm: LLM, jobs: list[tuple[str, SamplingParams]]) -> Answers:
    found = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    return [[(each.token_ids, each.logprobs, each.finish_reason) for each in one.outputs] for one in found]


def one_by_one(folder: Path, jobs: list[tuple[str, SamplingParams]]) -> Answers:
    """Alone, and every token by a step of its own: no draft tokens."""
    with LLM(**tiny_options(folder, dtype="float32")) as llm:  # type: ignore[arg-type]
        assert llm._engine._constraints is not None
        llm._engine._constraints._verifies = False
        return [answers(llm, [job])[0] for job in jobs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Answers:
    return one_by_one(folder, [*JOBS, *FREE])


def test_every_answer_that_ends_follows_its_grammar(folder: Path, alone: Answers) -> None:
    with LLM(**tiny_options(folder, dtype="float32")) as llm:  # type: ignore[arg-type]
        ended = [[tokens for tokens, _, finish in answer if finish == "stop"] for answer in alone[: len(JOBS)]]
        texts = [
            [llm.tokenizer.decode(tokens) for answer in ended[at : at + len(WAYS)] for tokens in answer]
            for at in range(0, len(JOBS), len(WAYS))
        ]
    for text in texts[0]:
        said = json.loads(text)
        assert said["hello"] in ("hello world", "held")
        assert 2 <= len(said["well"]) <= 3
    assert all(re.fullmatch("(hello|held) [a-d]{2,6}!", text) for text in texts[1])
    assert {*texts[2]} <= {"hello, hello, hello", "hello, world"}
    assert all(re.fullmatch(r"(\(*)hello(\)*)", text) for text in texts[3])
    assert sum(map(len, texts)) >= 15, "most answers come to their end"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"num_blocks": 16},
        {"num_blocks": 16, "swap_space_gb": 0.01},
        {"max_num_batched_tokens": 24, "max_num_seqs": 24},
    ],
    ids=["roomy", "preempted", "swapped", "chunked"],
)
def test_company_preemption_chunks_depth_and_forced_tokens_change_nothing(
    folder: Path, alone: Answers, memory: dict[str, float], depth: int
) -> None:
    with LLM(**tiny_options(folder, dtype="float32", depth=depth, **memory)) as llm:  # type: ignore[arg-type]
        assert answers(llm, [*JOBS, *FREE]) == alone
        stats = llm.stats()
        assert bool(stats.preemptions) == ("num_blocks" in memory)
        assert stats.blocks_free == stats.blocks_total


def test_forced_tokens_save_steps(folder: Path) -> None:
    job = ("hello", SamplingParams(max_tokens=60, temperature=0, grammar=source.choice(["hello " * 9 + "x"])))
    with LLM(**tiny_options(folder, dtype="float32")) as llm:  # type: ignore[arg-type]
        ((tokens, _, _),) = answers(llm, [job])[0:1][0]
        assert llm.stats().steps < len(tokens) / 2


def test_another_engine_goes_on_in_the_middle_of_a_grammar(folder: Path, alone: Answers) -> None:
    prompt, params = JOBS[0]
    tokens = alone[0][0][0]
    with LLM(**tiny_options(folder, dtype="float32")) as llm:  # type: ignore[arg-type]
        encoded = llm.tokenizer.encode(prompt)
        for id, count in enumerate((1, 4, len(tokens) - 1)):
            submit = Submit(id, [*encoded, *tokens[:count]], params, num_prompt=len(encoded), is_resumed=True)
            llm._engine.add(submit)
        got: dict[int, list[int]] = {}
        while llm._engine.has_work:
            for end in llm._engine.step().finished:
                got[end.id] = list(end.tokens)
    assert got == dict.fromkeys(range(3), tokens)


def test_an_output_that_does_not_follow_is_refused_and_others_go_on(folder: Path) -> None:
    with LLM(**tiny_options(folder)) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=9, temperature=0, grammar=GRAMMARS[2])
        llm._engine.add(Submit(1, [5, 6, 7], params, num_prompt=2, is_resumed=True))
        llm._engine.add(Submit(2, [5, 6, 7], params))
        ends = {}
        while llm._engine.has_work:
            ends |= {end.id: end for end in llm._engine.step().finished}
    assert (ends[1].finish, ends[1].param) == ("error", "grammar")
    assert ends[2].finish in ("stop", "length")


def test_a_request_that_is_aborted_before_its_grammar_is_compiled_ends_once(folder: Path) -> None:
    with LLM(**tiny_options(folder)) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=9, grammar=source.choice(["hello world"]))
        llm._engine.add(Submit(1, [5, 6], params))
        ended = llm._engine.abort(1)
        assert ended is not None
        assert (ended.id, ended.finish) == (1, "abort")
        assert llm._engine.abort(1) is None
        assert not llm._engine.has_work
        assert answers(llm, [("hello", params)])[0][0][2] == "stop", "what was compiled for it is of use"


def test_requests_that_wait_for_their_grammars_count_as_waiting(folder: Path) -> None:
    with LLM(**tiny_options(folder, max_waiting=3)) as llm:  # type: ignore[arg-type]
        for id in range(3):
            llm._engine.add(
                Submit(id, [1, 2], SamplingParams(max_tokens=30, grammar=source.regex(f"(hello|held) {id}")))
            )
        for params in (SamplingParams(max_tokens=3), SamplingParams(max_tokens=9, grammar=source.regex("hello"))):
            with pytest.raises(Overloaded, match="3 requests are waiting"):
                llm._engine.add(Submit(3, [1, 2], params))
        ended = []
        while llm._engine.has_work:
            ended += [output.id for output in llm._engine.step().finished]
        assert sorted(ended) == [0, 1, 2]
        assert llm._engine.has_room


def test_what_a_grammar_rules_out_is_refused_before_anything_runs(folder: Path) -> None:
    with LLM(**tiny_options(folder)) as llm:  # type: ignore[arg-type]
        for changes in ({"ignore_eos": True}, {"min_tokens": 3}):
            with pytest.raises(RequestError, match="no answer held to a grammar"):
                llm.generate("hello", SamplingParams(grammar=GRAMMARS[0], **changes))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="cannot be used"):
            llm.generate("hello", SamplingParams(grammar=source.regex("(")))


@pytest.mark.parametrize("is_busy", [False, True])
def test_time_in_which_a_grammar_is_compiled_is_told_as_such(folder: Path, is_busy: bool) -> None:
    words = source.choice([f"hello {number:07d}" for number in range(12_000)])
    with LLM(**tiny_options(folder, dtype="float32")) as llm:  # type: ignore[arg-type]
        engine, prompt = llm._engine, tuple(llm.tokenizer.encode("hello"))
        if is_busy:
            engine.add(Submit(1, prompt, SamplingParams(max_tokens=400, ignore_eos=True), seed=1))
            engine.step()
        engine.add(Submit(2, prompt, SamplingParams(max_tokens=8, grammar=words), seed=1))
        told = engine.explain(2)
        while told is None or not told.finish:
            engine.step()
            told = engine.explain(2)
    (wait,) = told.waits
    parts = {note.reason: note.seconds for note in wait.reasons}
    assert parts["grammar"] > 0.0
    assert parts["grammar"] == max(parts.values())
    assert sum(parts.values()) == pytest.approx(wait.seconds)
    assert sum(told.parts_s.values()) == pytest.approx(told.total_s)
