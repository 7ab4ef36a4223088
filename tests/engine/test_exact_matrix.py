"""One law over all features: whatever goes together in a batch, every token and log probability of a request is what it
gets alone, at depth 1, without speculation.

{plain, grammar, forced tokens, suffix, draft model, adapters, and these together} x {greedy, sampled, three answers,
penalties with log probabilities} x {preempted and computed again, swapped} x depth 1, 2; and where an engine ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from adapter_files import random_adapter_files
from exact_kit import Answers, FreeTokens, run
from headway.build import build_engine, load
from headway.config import EngineConfig
from headway.core.preemption import preempt
from headway.engine.client import Submit
from headway.engine.engine import Engine
from headway.engine.journal import OpenRequest
from headway.engine.speculating import Speculation
from headway.grammar import source
from headway.values.events import PreemptReason
from headway.values.params import SamplingParams
from headway.values.plan import StepPlan
from tiny_dir import tiny_options, write_tiny_model

PROMPT = [70, 101, 108, 108, 111, 44, 32, 119, 104, 111, 32, 97, 114, 101, 32, 121, 111, 117, 63, 70, 101, 108, 108]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
GRAMMARS = {"": "", "held": source.json_schema(SCHEMA), "forced": source.regex("(first, |second; ){9}")}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "top_k": 5},
    "penalized": {"temperature": 0.4, "top_k": 4, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logprobs": 2},
}


class Feature(NamedTuple):
    """What requests ask for, turn by turn, and who guesses."""

    grammars: tuple[str, ...] = ("",)
    adapters: tuple[str, ...] = ("",)
    guesses: str = "off"


FEATURES = {
    "plain": Feature(),
    "grammar": Feature(("held", "")),
    "forced tokens": Feature(("forced", "")),
    "suffix": Feature(guesses="suffix"),
    "draft model": Feature(guesses="model"),
    "adapters": Feature(adapters=("one", "", "two")),
    "adapters, suffix": Feature(adapters=("one", "", "two"), guesses="suffix"),
    "adapters, draft model": Feature(adapters=("one", "", "two"), guesses="model"),
    "grammar, suffix": Feature(("held", "forced", ""), guesses="suffix"),
    "all, suffix": Feature(("held", "", "forced", ""), ("one", "", "two"), "suffix"),
    "all, draft model": Feature(("held", "", "forced", ""), ("one", "", "two"), "model"),
}
MEMORY: dict[str, dict[str, object]] = {"recompute": {}, "swap": {"swap_space_gb": 0.01}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    spec = write_tiny_model(folder)
    for seed, name in enumerate(("one", "two")):
        random_adapter_files(folder / name, spec, seed, size=1.5)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    engine = build(folder, "off")
    yield engine
    engine.close()


def build(folder: Path, guesses: str, **changes: object) -> Engine:
    """With adapters always; what is guessed is verified whether or not that pays."""
    wanted = {"draft_model": str(folder)} if guesses == "model" else {}
    adapters = tuple(f"{name}={folder / name}" for name in ("one", "two"))
    options = {"max_num_seqs": 8, "speculation": guesses, "adapter": adapters, **wanted, **changes}
    config = EngineConfig.of(**tiny_options(folder, **options))
    engine = build_engine(config, load(config))
    if guesses != "off":
        depth, has_model = config.scheduler.num_plans, guesses == "model"
        engine._speculation = Speculation(
            engine.scheduler, most=5, depth=depth, has_model=has_model, times=FreeTokens()
        )
    return engine


def requests(feature: Feature) -> list[Submit]:
    """Each kind of sampling with each grammar and adapter of the feature; the sampled ones have three answers."""
    submits: list[Submit] = []
    for grammar in feature.grammars:
        for adapter in feature.adapters:
            for number, fields in enumerate(SAMPLING.values()):
                text = GRAMMARS[grammar]
                params = SamplingParams(max_tokens=40, grammar=text, ignore_eos=not text, **fields)  # type: ignore[arg-type]
                first, prompt = len(submits), [*PROMPT, *range(40, 40 + number)]
                for choice in range(3 if number == 1 else 1):
                    parent = first if choice else None
                    submits.append(
                        Submit(first + choice, prompt, params, seed=number + 7 * choice, parent=parent, adapter=adapter)
                    )
    return submits


def alone(plain: Engine, submits: list[Submit]) -> Answers:
    answers: Answers = {}
    for each in submits:
        single = Submit(each.id, each.tokens, each.params, seed=each.seed, adapter=each.adapter)
        answers |= run(plain, [single])
    return answers


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", FEATURES)
def test_every_request_gets_what_it_gets_alone(folder: Path, plain: Engine, name: str, memory: str, depth: int) -> None:
    feature, draw = FEATURES[name], random.Random(depth)
    submits = requests(feature)
    engine = build(folder, feature.guesses, depth=depth, num_blocks=60, **MEMORY[memory])

    def disturb() -> None:
        running = engine.scheduler.state.rows.running()
        if running and draw.random() < 0.1:
            preempt(engine.scheduler.state, draw.choice(running), PreemptReason.PRIORITY)

    drafted: list[bool] = []
    submit_plan = engine._executor.submit

    def noted(plan: StepPlan) -> None:
        drafted.append(any(chunk.drafts or chunk.num_drafts for chunk in plan.chunks))
        submit_plan(plan)

    engine._executor.submit = noted  # type: ignore[method-assign]
    try:
        found, wanted = run(engine, submits, disturb), alone(plain, submits)
        for submit in submits:
            assert found[submit.id] == wanted[submit.id], (submit.id, submit.adapter, submit.params.grammar[:40])
        stats = engine.stats()
        assert stats.preemptions > 0
        if depth > 1 and feature.guesses == "model":  # rows that wait for results miss steps: it may not pay
            return
        assert bool(stats.tokens_accepted) == (feature.guesses != "off")
        assert any(drafted) == (feature.guesses != "off" or set(feature.grammars) != {""})
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["adapters", "adapters, suffix", "adapters, draft model", "all, suffix"])
def test_a_request_goes_on_after_the_end_of_an_engine(folder: Path, plain: Engine, name: str) -> None:
    feature = FEATURES[name]
    submits = [each for each in requests(feature) if each.parent is None]
    wanted = alone(plain, submits)
    engine = build(folder, feature.guesses)
    try:
        for at in (1, 9, 22):
            entries = [OpenRequest(submit, 0.0) for submit in submits if at < len(wanted[submit.id][0])]
            for entry in entries:
                entry.tokens = wanted[entry.submit.id][0][:at]
            rest = run(engine, [entry.resubmission(1.0) for entry in entries])
            assert entries
            for entry in entries:
                id = entry.submit.id
                tokens, logprobs, finish = wanted[id]
                assert rest[id] == (tokens[at:], logprobs[at:], finish), (id, at)
    finally:
        engine.close()


def test_adapters_change_answers_so_that_these_tests_show_something(folder: Path, plain: Engine) -> None:
    found = alone(plain, [each for each in requests(FEATURES["adapters"]) if each.params.temperature == 0.0])
    assert len({tuple(tokens) for tokens, _, _ in found.values()}) == 3
