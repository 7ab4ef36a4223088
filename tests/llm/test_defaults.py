"""What `LLM` does where no sampling values are given: the model's, changed by the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from headway import LLM, SamplingParams
from headway.backends import cpu
from headway.errors import ConfigError, RequestError
from tiny_dir import tiny_options, write_tiny_model

PROMPT, TALK = "hello world", [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_p": 0.5}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(**tiny_options(folder)) as llm:  # type: ignore[arg-type]
        yield llm


def ids(llm: LLM, params: object) -> list[int]:
    return llm.generate(PROMPT, params)[0].outputs[0].token_ids  # type: ignore[arg-type]


def test_values_that_are_not_given_are_the_models(llm: LLM) -> None:
    greedy = ids(llm, GREEDY)
    assert ids(llm, None)[:24] == greedy[: len(ids(llm, None))]
    assert ids(llm, {"max_tokens": 24, "ignore_eos": True, "seed": 1}) == greedy
    assert (llm.defaults.temperature, llm.defaults.top_p, llm.defaults.top_k) == (0.0, 0.5, 0)


def test_given_values_win_and_explicit_params_keep_their_own(llm: LLM) -> None:
    hot = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)
    assert ids(llm, hot) != ids(llm, GREEDY)
    given = {"max_tokens": 24, "ignore_eos": True, "seed": 1, "temperature": 1.0, "top_p": 1.0}
    assert ids(llm, given) == ids(llm, hot)


def test_conversations_take_them_too(llm: LLM) -> None:
    (greedy,) = llm.chat([TALK], GREEDY)
    assert "".join(llm.stream_chat(TALK, {"max_tokens": 24, "ignore_eos": True})) == greedy.outputs[0].text
    (answer,) = llm.chat([TALK], {"max_tokens": 24, "ignore_eos": True})
    assert answer.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_configuration_overrides_the_model(folder: Path) -> None:
    changes = {"default_temperature": 1.0, "default_top_k": 40, "default_min_p": 0.1, "default_repetition_penalty": 1.2}
    with LLM(**tiny_options(folder, **changes)) as llm:  # type: ignore[arg-type]
        found = llm.defaults
        values = (found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty)
        assert values == (1.0, 0.5, 40, 0.1, 1.2)
        explicit = replace(GREEDY, temperature=1.0, top_p=0.5, top_k=40, min_p=0.1, repetition_penalty=1.2, seed=3)
        assert ids(llm, {"max_tokens": 24, "ignore_eos": True, "seed": 3}) == ids(llm, explicit)


def test_an_answer_without_a_length_ends_with_the_context_or_the_option(folder: Path, llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], {"ignore_eos": True})
    assert answer.outputs[0].finish_reason == "length"
    assert len(answer.prompt_tokens) + len(answer.outputs[0].token_ids) == llm.info.max_model_len
    with LLM(**tiny_options(folder, default_max_tokens=7)) as short:  # type: ignore[arg-type]
        assert len(ids(short, {"ignore_eos": True})) == 7
        assert len(ids(short, {"ignore_eos": True, "min_tokens": 9})) == 9
        assert len(ids(short, SamplingParams(ignore_eos=True))) == 128


def test_a_field_that_is_none_of_sampling_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"'temprature'.*allowed: .*temperature"):
        ids(llm, {"temprature": 1})


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 200}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "model"


def test_a_context_beyond_a_sliding_window_gives_what_transformers_gives(windowed: Path) -> None:
    prompt = [3 + place * 7 % 90 for place in range(260)]
    with LLM(**tiny_options(windowed, dtype="float32", kv_dtype="float32")) as llm:  # type: ignore[arg-type]
        got = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(windowed, dtype="float32")
    with torch.inference_mode():
        wanted = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=24, max_new_tokens=24)
    assert got == wanted[0, 260:].tolist()


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that cuts the context to the window, as that of CUDA devices does."""
    read = cpu.read_config
    monkeypatch.setattr(cpu, "read_config", lambda *given: read(*given).cut_to_window())


@pytest.mark.usefixtures("cut")
def test_a_context_beyond_a_sliding_window_is_refused_as_what_it_is(windowed: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 300; .* sliding window of 200 tokens \(its context is 512\)"):
        LLM(**tiny_options(windowed, max_model_len=300))  # type: ignore[arg-type]


@pytest.mark.usefixtures("cut")
def test_a_prompt_beyond_a_sliding_window_is_refused_as_what_it_is(
    windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headway.build")
    with (
        LLM(**tiny_options(windowed)) as llm,  # type: ignore[arg-type]
        pytest.raises(RequestError, match=r"context is 200 tokens, its sliding window; the prompt has 201"),
    ):
        llm.generate([[1] * 201], GREEDY)
    assert "context 200, the model's sliding window" in caplog.text
    with (
        LLM(**tiny_options(windowed, max_model_len=100)) as llm,  # type: ignore[arg-type]
        pytest.raises(RequestError, match=r"context is 100 tokens; the prompt has 201"),
    ):
        llm.generate([[1] * 201], GREEDY)
