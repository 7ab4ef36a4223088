"""Made-up weights: a model of any size answers where there is no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway import LLM, EngineConfig, SamplingParams
from headway.errors import ConfigError, ModelFormatError
from headway.models import shapes
from tiny_dir import tiny_options, write_tiny_model

ANSWER = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model directory without weights."""
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def test_a_directory_without_weights_answers_with_made_up_ones(bare: Path) -> None:
    with pytest.raises(ModelFormatError, match="has no weights"):
        LLM(**tiny_options(bare))  # type: ignore[arg-type]
    answers = []
    for _ in range(2):
        with LLM(**tiny_options(bare, dummy_weights=True)) as llm:  # type: ignore[arg-type]
            answers.append(llm.generate("hello", ANSWER)[0].outputs[0].token_ids)
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]


def test_a_shape_gives_the_sizes_and_the_name(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(shapes.shape_of("smollm2-135m"), hidden=64, intermediate=96, layers=1, heads=2, kv_heads=1)
    spec = replace(spec, head_dim=32, vocab_size=500, max_len=300)
    monkeypatch.setattr(shapes, "SHAPES", {"tiny-shape": spec})
    with LLM(**tiny_options(bare, dummy_weights=True, model_shape="tiny-shape")) as llm:  # type: ignore[arg-type]
        assert (llm.info.model, llm.info.vocab_size, llm.info.max_model_len) == ("tiny-shape", 500, 300)
        assert len(llm.generate("hello", ANSWER)[0].outputs[0].token_ids) == 6
    with pytest.raises(ConfigError, match=r"no model shape 'other'; allowed: tiny-shape"):
        LLM(**tiny_options(bare, dummy_weights=True, model_shape="other"))  # type: ignore[arg-type]


def test_a_shape_needs_made_up_weights() -> None:
    with pytest.raises(ConfigError, match=r"model_shape is 'llama-3.1-8b'; allowed: none, unless dummy_weights is set"):
        EngineConfig.of(model_shape="llama-3.1-8b")
