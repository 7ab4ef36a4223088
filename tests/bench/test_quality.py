"""`bench quality`: windows, chunks and targets line up, and the text is read as described."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.backends.cpu import LoadedCpu, load_model
from headway.bench import quality
from headway.bench.quality import Read, read_text, read_windows, variants
from headway.bench.setup import ModelSetup
from headway.cli.main import main
from headway.errors import ConfigError
from tiny_models import logits_alone


@pytest.fixture
def loaded(setup: ModelSetup) -> LoadedCpu:
    return load_model(setup.config())


@pytest.mark.parametrize(("count", "window"), [(20, 64), (41, 10), (33, 32), (31, 31), (22, 7)])
def test_every_token_but_a_windows_first_is_predicted_from_its_window(
    loaded: LoadedCpu, monkeypatch: pytest.MonkeyPatch, count: int, window: int
) -> None:
    monkeypatch.setattr(quality, "CHUNK", 4)
    ids = np.random.default_rng(count).integers(0, loaded.spec.vocab_size, count).tolist()
    found = read_windows(loaded, "float32", ids, window, lambda done: None)
    nats, best = [], []
    for start in range(0, count, window):
        part = ids[start : start + window]
        if len(part) < 2:
            continue
        logprobs = logits_alone(loaded.decoder, part).double().log_softmax(-1)  # type: ignore[arg-type]
        nats += [-float(logprobs[i, token]) for i, token in enumerate(part[1:])]
        best += logprobs[:-1].argmax(-1).tolist()
    assert found.best.tolist() == best
    assert found.nats == pytest.approx(nats)


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    read = Read(np.array([math.log(2), math.log(8)]), np.array([0, 0]))
    assert read.perplexity == pytest.approx(4)


def test_squad_contexts_come_in_order_and_once(tmp_path: Path) -> None:
    articles = [{"paragraphs": [{"context": "one"}, {"context": "two"}]}, {"paragraphs": [{"context": "one"}]}]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    assert read_text(path) == "one\n\ntwo"
    path.write_text('{"data": 3}')
    with pytest.raises(ConfigError, match=r"squad.json is neither UTF-8 text nor JSON"):
        read_text(path)
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_text(tmp_path / "nothing.txt")


def test_several_formats_give_every_combination() -> None:
    found = [(one.dtype, one.kv_dtype) for one in variants(ModelSetup(dtype="int8, q4", kv_dtype="fp16,int8"))]
    assert found == [("int8", "fp16"), ("int8", "int8"), ("q4", "fp16"), ("q4", "int8")]


def test_quality_bench_holds_every_format_against_float32(
    tmp_path: Path, flags: list[str], last_line: Callable[[], dict[str, Any]]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a cab, a bad cab: abba! " * 8)
    command = ["bench", "quality", "--text", str(text), "--tokens", "90", "--window", "40", "--json"]
    assert main([*command, *flags], {}) == 0
    record = last_line()
    assert (record["tokens"], record["window"]) == (90, 40)
    (row,) = record["rows"]
    assert (row["dtype"], row["kv_dtype"], row["change"], row["same_top1"]) == ("float32", "float32", 0, 1)
    assert 1 < row["perplexity"] < math.inf


def test_text_that_predicts_nothing_is_refused(tmp_path: Path, setup: ModelSetup) -> None:
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(ConfigError, match="at least 2"):
        quality.run(setup, text=tmp_path / "short.txt")
    (tmp_path / "short.txt").write_text("a b c d")
    with pytest.raises(ConfigError, match="window is 5000"):
        quality.run(setup, text=tmp_path / "short.txt", window=5000)
