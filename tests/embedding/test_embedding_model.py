"""Vectors of texts: those of transformers, and the same bits in any company."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from headway.embedding.model import EmbeddingModel, load_embedding_model
from headway.embedding.source import open_embedding_source
from headway.errors import ConfigError, ModelFormatError
from headway.kernels import library
from headway.modelfile.cache import ModelCache
from tiny_encoders import write_tiny_encoder

TEXTS = [[2, 4, 5, 3], [2, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 3], [2, 3], [2, *[5, 7] * 30, 3]]
KERNELS = ["ref"] if library.find_library() is None else ["ref", "native", "native-generic"]


def load(folder: Path, kernels: str = "ref", threads: int = 1) -> EmbeddingModel:
    return load_embedding_model(open_embedding_source(str(folder), ModelCache(folder / "cache")), kernels, threads)


def unit(vector: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vector.double(), dim=-1).numpy()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str, kernels: str, pooling: str) -> None:
    theirs = write_tiny_encoder(tmp_path / "m", kind, pooling)
    ours = load(tmp_path / "m", kernels)
    found = ours.embed(TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            hidden = theirs(torch.tensor([text])).last_hidden_state[0]
        wanted = unit({"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[pooling])
        assert np.abs(vector - wanted).max() < 1e-4
        assert abs(float(np.square(vector, dtype=np.float64).sum()) - 1) < 1e-6


@pytest.mark.parametrize("kernels", KERNELS)
def test_bits_do_not_depend_on_other_texts_threads_or_slices(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_encoder(tmp_path / "m")
    ours, many = load(tmp_path / "m", kernels), load(tmp_path / "m", kernels, threads=3)
    alone = [ours.embed([text])[0] for text in TEXTS]
    order = [3, 0, 2, 1, 1, 0, 3, 3]
    for model in (ours, many):
        together = model.embed([TEXTS[at] for at in order])
        assert all(np.array_equal(together[row], alone[at]) for row, at in enumerate(order))
    monkeypatch.setattr("headway.embedding.model.SLICE_TOKENS", 20)
    assert np.array_equal(ours.embed([TEXTS[at] for at in order]), together)


def test_a_decoder_gives_its_last_vector(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    # What the model is computed with: bfloat16 is exact in float32.
    theirs.load_state_dict({name: value.bfloat16().float() for name, value in theirs.state_dict().items()})
    folder = tmp_path / "m"
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, folder / "model.safetensors")
    write_tiny_encoder(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(folder / "tokenizer.json")
    ours = load(folder, KERNELS[-1])
    found = ours.embed(TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            wanted = unit(theirs.model(torch.tensor([text])).last_hidden_state[0, -1])
        assert np.abs(vector - wanted).max() < 1e-4
    assert np.array_equal(ours.embed([TEXTS[1]])[0], found[1])
    assert ours.max_tokens == 128


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"hidden_act": "relu"}, "hidden_act = 'relu'; allowed: gelu"),
        ("config.json", {"position_embedding_type": "relative_key"}, "allowed: absolute"),
        ("config.json", {"num_attention_heads": 5}, "does not divide"),
        ("config.json", {"intermediate_size": 95}, r"\[96, 48\]; the config says \[95, 48\]"),
        ("config.json", {"num_hidden_layers": 4}, "the weights lack 'encoder.layer.3"),
        ("config.json", {"num_hidden_layers": 2}, "the weights hold 'encoder.layer.2"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "has the modes pooling_mode_mean_tokens, pooling_mode_max",
        ),
    ],
)
def test_what_is_computed_otherwise_is_refused(
    tmp_path: Path, file: str, changes: dict[str, object], words: str
) -> None:
    write_tiny_encoder(tmp_path / "m")
    change(tmp_path / "m" / file, **changes)
    with pytest.raises((ConfigError, ModelFormatError), match=words):
        load(tmp_path / "m")


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path / "m")
    modules = json.loads((tmp_path / "m" / "modules.json").read_text())
    (tmp_path / "m" / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ConfigError, match="'Dense'; allowed: Transformer, Pooling, Normalize"):
        load(tmp_path / "m")


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedding_model is 'nowhere'.*BertModel"):
        open_embedding_source("nowhere", ModelCache(tmp_path))
