"""Speculation changes nothing but speed: every token and log probability is the same, in any company, cut anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from exact_kit import Answers, DearTokens, FreeTokens, run
from headway.build import build_engine, load
from headway.config import EngineConfig
from headway.core.preemption import preempt
from headway.core.request import Request
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.engine.journal import OpenRequest
from headway.engine.speculating import Speculation
from headway.errors import ConfigError, RequestError
from headway.grammar import source
from headway.spec.verify_times import MOST_TOKENS, VerifyTimes
from headway.values.events import PreemptReason
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan
from tiny_dir import tiny_options, write_tiny_model

PROMPT = [70, 101, 108, 108, 111, 44, 32, 119, 104, 111, 32, 97, 114, 101, 32, 121, 111, 117, 63, 70, 101, 108, 108]
LONG = {"max_tokens": 60, "ignore_eos": True}
CASES = {
    "greedy": SamplingParams(temperature=0.0, **LONG),  # type: ignore[arg-type]
    "sampled": SamplingParams(temperature=0.5, top_k=3, **LONG),  # type: ignore[arg-type]
    "penalties": SamplingParams(temperature=0.4, top_k=4, presence_penalty=-0.5, logprobs=2, **LONG),  # type: ignore[arg-type]
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, **LONG),  # type: ignore[arg-type]
    "stops": SamplingParams(max_tokens=60, temperature=0.3, stop_token_ids=tuple(range(0, 260, 31))),
    "short": SamplingParams(max_tokens=3, temperature=0.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    engine = build(folder, speculation="off")
    yield engine
    engine.close()


def build(folder: Path, times: Callable[[], VerifyTimes] | None = None, **changes: object) -> Engine:
    wanted = {} if "draft_model" in changes else {"speculation": "suffix"}
    config = EngineConfig.of(**tiny_options(folder, **{"max_num_seqs": 8, **wanted, **changes}))
    engine = build_engine(config, load(config))
    if times is not None:
        depth, has_model = config.scheduler.num_plans, config.scheduler.draft_model is not None
        engine._speculation = Speculation(engine.scheduler, most=5, depth=depth, has_model=has_model, times=times())
    return engine


def by_model(folder: Path, source: str) -> dict[str, object]:
    """Options with which the model guesses for itself, or none."""
    return {"draft_model": str(folder)} if source == "model" else {}


def requests(names: Sequence[str]) -> list[Submit]:
    """For each a request and two more answers to its prompt."""
    submits: list[Submit] = []
    for number, name in enumerate(names):
        prompt = [*PROMPT, *range(40, 40 + number % 3)]
        first = Submit(len(submits), prompt, CASES[name], seed=number)
        submits.append(first)
        submits += [Submit(first.id + i, prompt, CASES[name], seed=number + 7 * i, parent=first.id) for i in (1, 2)]
    return submits


def alone(plain: Engine, submits: Sequence[Submit]) -> Answers:
    answers: Answers = {}
    for submit in submits:
        answers |= run(plain, [Submit(submit.id, submit.tokens, submit.params, seed=submit.seed)])
    return answers


@pytest.mark.parametrize("source", ["suffix", "model"])
@pytest.mark.parametrize("times", [FreeTokens, DearTokens])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "memory", [{}, {"num_blocks": 26}, {"num_blocks": 26, "swap_space_gb": 0.01}], ids=["plenty", "recompute", "swap"]
)
def test_every_token_and_log_probability_is_that_of_the_request_alone_without_speculation(
    folder: Path, plain: Engine, source: str, times: Callable[[], VerifyTimes], depth: int, memory: dict[str, object]
) -> None:
    submits = requests(list(CASES))
    engine = build(folder, times, depth=depth, **memory, **by_model(folder, source))
    assert run(engine, submits) == alone(plain, submits)
    stats = engine.stats()
    assert stats.tokens_drafted >= stats.tokens_accepted > 0, "nothing was guessed: the test shows nothing"
    assert stats.drafts > 0
    assert bool(stats.preemptions) == bool(memory)
    engine.close()


@pytest.mark.parametrize("source", ["suffix", "model"])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_are_preempted_while_they_wait_for_results_go_on_the_same(
    folder: Path, plain: Engine, source: str, depth: int
) -> None:
    draw, submits = random.Random(depth), requests(["greedy", "sampled"])
    engine = build(folder, FreeTokens, depth=depth, swap_space_gb=0.01, **by_model(folder, source))

    def disturb() -> None:
        running = engine.scheduler.state.rows.running()
        if running and draw.random() < 0.15:
            preempt(engine.scheduler.state, draw.choice(running), PreemptReason.PRIORITY)

    assert run(engine, submits, disturb) == alone(plain, submits)
    assert engine.stats().tokens_accepted > 0
    engine.close()


@pytest.mark.parametrize("source", ["suffix", "model"])
def test_a_request_goes_on_in_another_engine_wherever_it_was_cut(folder: Path, plain: Engine, source: str) -> None:
    engine = build(folder, FreeTokens, **by_model(folder, source))
    for name in ("greedy", "penalties"):
        submit = Submit(1, PROMPT, CASES[name], seed=3)
        tokens, logprobs, _ = run(plain, [submit])[1]
        for at in range(1, len(tokens), 7):
            entry = OpenRequest(submit, 0.0)
            entry.tokens = tokens[:at]
            rest, rest_logprobs, _ = run(engine, [entry.resubmission(1.0)])[1]
            assert (tokens[:at] + rest, logprobs[:at] + rest_logprobs if logprobs else []) == (tokens, logprobs)
    assert engine.stats().tokens_accepted > 0
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_may_opt_out_and_its_neighbours_go_on_guessing(folder: Path, depth: int) -> None:
    engine = build(folder, FreeTokens, depth=depth)
    verified: set[int] = set()
    submit = engine._executor.submit

    def noted(plan: StepPlan) -> None:
        verified.update(engine.scheduler.state.at(chunk.row).id for chunk in plan.chunks if chunk.drafts)
        submit(plan)

    engine._executor.submit = noted  # type: ignore[method-assign]
    run(engine, [Submit(1, PROMPT, CASES["greedy"], speculates=False), Submit(2, PROMPT, CASES["greedy"])])
    assert verified == {2}
    engine.close()


@pytest.mark.parametrize("guesses", ["suffix", "model"])
@pytest.mark.parametrize("times", [FreeTokens, DearTokens])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_with_and_without_a_grammar_speculate_beside_each_other(
    folder: Path, plain: Engine, guesses: str, times: Callable[[], VerifyTimes], depth: int
) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    held = SamplingParams(max_tokens=50, temperature=0.6, grammar=source.json_schema(schema))
    listed = SamplingParams(max_tokens=40, temperature=0.0, grammar=source.regex("(ab|cd, ){12}"), logprobs=1)
    submits = [*requests(["greedy", "sampled"]), *(Submit(50 + i, PROMPT, held, seed=i) for i in range(3))]
    submits.append(Submit(60, PROMPT, listed))
    engine = build(folder, times, depth=depth, num_blocks=40, **by_model(folder, guesses))
    assert run(engine, submits) == alone(plain, submits)
    assert engine.stats().tokens_accepted > 0
    engine.close()


def test_rows_that_do_not_speculate_decode_as_without(folder: Path) -> None:
    class Dear(VerifyTimes):
        def table(self) -> list[float]:
            return [0.0, *(float(n) for n in range(1, MOST_TOKENS + 1))]

    def plans_of(engine: Engine) -> list[tuple[list[int], int]]:
        plans: list[tuple[list[int], int]] = []
        submit = engine._executor.submit

        def noted(plan: StepPlan) -> None:
            plans.append((list(plan.decode), len(plan.chunks)))
            submit(plan)

        engine._executor.submit = noted  # type: ignore[method-assign]
        run(engine, requests(["greedy", "sampled"]))
        engine.close()
        return plans

    assert plans_of(build(folder, Dear, depth=2)) == plans_of(build(folder, depth=2, speculation="off"))


def test_its_cost_is_learned_and_outputs_are_remembered_within_a_namespace(folder: Path) -> None:
    engine = build(folder)
    speculation = engine._speculation
    assert speculation is not None
    assert engine.info.speculation == "suffix"
    first = run(engine, [Submit(1, PROMPT, CASES["greedy"])])[1][0]
    assert speculation._times.table()[1] > 0.0
    chains = {engine._request(Submit(2, PROMPT, CASES["greedy"], salt=salt)).chain for salt in ("", "other")}
    found = [speculation._past.find(chain, first[:6], 4).length for chain in chains]
    assert sorted(found) == [0, 6] or sorted(map(bool, found)) == [False, True]
    assert not speculation._requests
    assert not speculation._waiting
    assert not speculation._guessing
    engine.close()


def test_a_request_that_the_scheduler_refuses_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder)

    def refuse(req: Request) -> None:
        raise RequestError(f"no room for {req.id}")

    monkeypatch.setattr(engine.scheduler, "add", refuse)
    with pytest.raises(RequestError, match="no room for 1"):
        engine.add(Submit(1, PROMPT, CASES["greedy"]))
    assert engine._speculation is not None
    assert not engine._speculation._requests
    engine.close()


def test_a_backend_that_verifies_no_draft_tokens_is_named(folder: Path) -> None:
    config = EngineConfig.of(device="null_backend:PLUGIN", speculation="suffix")
    with pytest.raises(ConfigError, match=r"speculation is 'suffix'.*null.*allowed there: off, auto"):
        build_engine(config)
    engine = build_engine(EngineConfig.of(device="null_backend:PLUGIN"))
    assert engine.info.speculation == "off"
    assert engine.stats().tokens_drafted == 0
    engine.close()


def test_a_model_that_guesses_for_itself_is_nearly_always_right_whatever_is_shared_copied_or_swapped(
    folder: Path,
) -> None:
    """Rows are drawn by the same numbers, so that sampled rows guess as well as greedy ones."""
    for memory in ({}, {"num_blocks": 26, "swap_space_gb": 0.01}):
        engine = build(folder, FreeTokens, **memory, **by_model(folder, "model"))
        run(engine, requests(["greedy", "sampled", "penalties"]))
        stats = engine.stats()
        assert engine.info.speculation == "model"
        assert stats.tokens_accepted > 0.97 * stats.tokens_drafted > 0
        engine.close()


def test_a_long_prompt_is_caught_up_with_step_by_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runner.draft.CATCH_UP", 16)
    engine = build(folder, FreeTokens, **by_model(folder, "model"))
    sizes: list[int] = []
    model = engine._executor._draft._model  # type: ignore[attr-defined]
    pick = model.pick
    monkeypatch.setattr(model, "pick", lambda batch, *rest: (sizes.append(len(batch.tokens)), pick(batch, *rest))[1])
    run(engine, [Submit(1, PROMPT * 5, CASES["greedy"])])
    assert max(sizes) == 16
    assert sizes.count(16) >= len(PROMPT) * 5 // 16
    assert engine.stats().tokens_accepted > 0.9 * engine.stats().tokens_drafted > 0
    engine.close()


def test_a_draft_model_that_fails_costs_its_guesses_and_no_request(
    folder: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder, FreeTokens, **by_model(folder, "model"))

    def fail(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(engine._executor._draft._model, "pick", fail)  # type: ignore[attr-defined]
    submits = requests(["greedy"])
    assert run(engine, submits) == alone(plain, submits)
    assert engine.stats().tokens_accepted == 0
    engine.close()


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", marks=["<one more>"])
    with pytest.raises(ConfigError, match="must have the vocabulary of the model it guesses for"):
        build(folder, draft_model=str(tmp_path / "other"))
    for options in ({"speculation": "model"}, {"device": "null_backend:PLUGIN", "draft_model": str(folder)}):
        with pytest.raises(ConfigError, match="it needs one, on device cpu"):
            build_engine(EngineConfig.of(**{"model": str(folder), **options}))  # type: ignore[arg-type]


def test_a_draft_model_takes_a_part_of_the_kv_memory(folder: Path) -> None:
    sizes = {}
    for options in ({}, {"draft_model": str(folder)}):
        engine = build(folder, num_blocks=None, kv_memory_gb=0.01, **options)
        sizes[len(options)] = engine.stats().blocks_total
        engine.close()
    assert sizes[1] == sizes[0] // 2


def test_requests_with_penalties_have_no_guesses_where_the_backend_verifies_none_of_them(folder: Path) -> None:
    found = {}
    for takes in (True, False):
        engine = build(folder, FreeTokens)
        assert engine._speculation is not None
        engine._speculation._takes_penalties = takes
        answer = run(engine, [Submit(1, PROMPT, CASES["penalties"], seed=3)])
        found[takes] = (engine.stats().tokens_drafted > 0, answer)
        run(engine, [Submit(2, PROMPT, CASES["greedy"])])
        assert engine.stats().tokens_accepted > 0
        engine.close()
    assert [found[takes][0] for takes in (True, False)] == [True, False]
    assert found[True][1] == found[False][1]
