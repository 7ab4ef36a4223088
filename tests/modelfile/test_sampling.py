"""Sampling values a model recommends: from a directory, from GGUF metadata, of the bundled model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from gguf_files import tiny_model, write
from headway.modelfile.bundled import SMOLLM2, locate
from headway.modelfile.cache import ModelCache
from headway.modelfile.source import resolve
from tiny_dir import write_tiny_model


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def directory(tmp_path: Path, **generation: object) -> str:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    return str(tmp_path / "model")


def test_generation_config_of_a_directory_is_read(tmp_path: Path, cache: ModelCache) -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    others = {"do_sample": True, "max_new_tokens": 9, "transformers_version": "4.40.0"}
    assert resolve(directory(tmp_path, **given, **others), cache).sampling == given


def test_what_a_directory_leaves_out_is_left_out(tmp_path: Path, cache: ModelCache) -> None:
    write_tiny_model(tmp_path / "model")
    assert resolve(str(tmp_path / "model"), cache).sampling == {}
    path = directory(tmp_path, temperature=None, top_k=-1)
    assert resolve(path, cache).sampling == {"top_k": 0}


def test_a_value_no_request_may_have_is_left_out_and_logged(
    tmp_path: Path, cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = directory(tmp_path, temperature="hot", top_p=1.5, top_k=20.5, min_p=0.1)
    with caplog.at_level(logging.WARNING):
        assert resolve(path, cache).sampling == {"min_p": 0.1}
    assert "top_p is 1.5; allowed: above 0, up to 1" in caplog.text
    assert "generation_config.json" in caplog.text


def test_gguf_metadata_is_read(tmp_path: Path, cache: ModelCache) -> None:
    metadata, tensors = tiny_model()
    assert resolve(str(write(tmp_path / "plain.gguf", metadata, tensors)), cache).sampling == {}
    keys = {"temp": 0.2, "top_p": 0.9, "top_k": 40, "penalty_repeat": 1.1}
    metadata |= {f"general.sampling.{name}": value for name, value in keys.items()}
    found = resolve(str(write(tmp_path / "told.gguf", metadata, tensors)), cache).sampling
    assert found == {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}


def test_bundled_model_has_the_values_its_authors_recommend_by_name_and_by_file(cache: ModelCache) -> None:
    recommended = {"temperature": 0.2, "top_p": 0.9}
    assert resolve("smollm2", cache).sampling == recommended
    path = locate(SMOLLM2, cache)
    assert path is not None
    assert resolve(str(path), cache).sampling == recommended
