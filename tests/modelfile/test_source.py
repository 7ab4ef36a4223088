"""From what the user typed to a model, for every kind, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from gguf_files import tiny_model, write
from headway.errors import ConfigError, ModelFormatError
from headway.modelfile.cache import ModelCache
from headway.modelfile.source import list_models, resolve
from tiny_dir import write_tiny_model

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(path / "tokenizer.json"))
    save_file({"model.norm.weight": torch.ones(16).bfloat16()}, path / "model.safetensors")
    return path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(model: Path | str, cache: ModelCache) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(str(model), cache)
    return str(caught.value)


def test_bundled_name_and_alias_are_the_same_model(cache: ModelCache) -> None:
    source = resolve("smollm2-135m-instruct", cache)
    assert resolve("SmolLM2", cache) == source
    assert (source.name, source.kind) == ("smollm2-135m-instruct", "gguf")
    assert source.eos_ids == (2,)
    assert (source.bos_token, source.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert source.chat_template is not None
    assert "im_start" in source.chat_template


def test_gguf_file_is_converted_once_into_the_cache(tmp_path: Path, cache: ModelCache) -> None:
    metadata, tensors = tiny_model("qwen2")
    path = write(tmp_path / "my-model.gguf", {**metadata, "tokenizer.chat_template": "{{ messages }}"}, tensors)
    source = resolve(str(path), cache)
    assert source.name == "my-model"
    assert source.config["architectures"] == ["Qwen2ForCausalLM"]
    assert source.chat_template == "{{ messages }}"
    assert source.eos_ids == (0,)
    tokenizer = source.tokenizer_path()
    assert tokenizer.is_relative_to(cache.root / source.digest)
    assert Tokenizer.from_file(str(tokenizer)).encode("abc").ids == [28]
    first = tokenizer.stat().st_ino
    assert resolve(str(path), cache).tokenizer_path().stat().st_ino == first
    got = dict(source.tensors())
    np.testing.assert_array_equal(got["model.norm.weight"], tensors["output_norm.weight"])


def test_turn_ends_in_the_vocabulary_end_an_answer(tmp_path: Path, cache: ModelCache) -> None:
    metadata, tensors = tiny_model()
    metadata["tokenizer.ggml.tokens"][5] = "<|im_end|>"  # type: ignore[index]
    metadata["tokenizer.ggml.eot_token_id"] = 7
    assert resolve(str(write(tmp_path / "m.gguf", metadata, tensors)), cache).eos_ids == (0, 5, 7)


def test_part_of_a_split_gguf_is_refused(tmp_path: Path, cache: ModelCache) -> None:
    metadata, tensors = tiny_model()
    assert "3 parts" in refusal(write(tmp_path / "m.gguf", {**metadata, "split.count": 3}, tensors), cache)


def test_directory_is_read_with_its_words(folder: Path, cache: ModelCache) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    words = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "hello"}],
        "added_tokens_decoder": {"9": {"content": "</s>"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    source = resolve(str(folder), cache)
    assert (source.name, source.kind, source.eos_ids) == ("tiny-llama", "directory", (2, 5, 9))
    assert (source.bos_token, source.eos_token, source.chat_template) == ("<s>", "</s>", "hello")
    assert source.tokenizer_path() == folder / "tokenizer.json"
    ((name, tensor),) = source.tensors()
    assert name == "model.norm.weight"
    np.testing.assert_array_equal(tensor, np.ones(16, np.float32))
    (folder / "chat_template.jinja").write_text("own file")
    assert resolve(str(folder), cache).chat_template == "own file"


def test_digest_follows_the_weights(folder: Path, cache: ModelCache) -> None:
    before = resolve(str(folder), cache).digest
    assert resolve(str(folder), cache).digest == before
    save_file({"model.norm.weight": torch.zeros(16).bfloat16()}, folder / "model.safetensors")
    assert resolve(str(folder), cache).digest != before


def test_shards_are_joined_by_their_index(folder: Path, cache: ModelCache) -> None:
    (folder / "model.safetensors").unlink()
    for index in (1, 2):
        save_file({f"w{index}": torch.full((2,), float(index))}, folder / f"model-{index}.safetensors")
    files = {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert sorted(name for name, _ in resolve(str(folder), cache).tensors()) == ["w1", "w2"]
    save_file({"w1": torch.ones(2)}, folder / "model-2.safetensors")
    with pytest.raises(ModelFormatError, match="'w1'"):
        list(resolve(str(folder), cache).tensors())
    (folder / "model-2.safetensors").unlink()
    assert "model-2.safetensors is missing" in refusal(folder, cache)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "x.bin", 5])
def test_an_index_cannot_point_outside(folder: Path, cache: ModelCache, name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert "beside it" in refusal(folder, cache)


def test_tied_heads_and_rotary_tables_are_not_weights(folder: Path, cache: ModelCache) -> None:
    kept = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(2)}
    save_file({**kept, "x": torch.ones(1)}, folder / "model.safetensors")
    assert [name for name, _ in resolve(str(folder), cache).tensors()] == ["lm_head.weight", "x"]
    edit(folder / "config.json", tie_word_embeddings=True)
    assert [name for name, _ in resolve(str(folder), cache).tensors()] == ["x"]


@pytest.mark.parametrize(
    ("joined", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, None),
        ({"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_both_spellings_of_rope_read_the_same(
    folder: Path, cache: ModelCache, joined: dict[str, object], scaling: object
) -> None:
    edit(folder / "config.json", rope_parameters=joined)
    config = resolve(str(folder), cache).config
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, scaling)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"auto_map": {"AutoModel": "modeling.X"}}, "no code"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architecture"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"vocab_size": "32"}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
    ],
)
def test_configs_we_do_not_run_are_refused_with_the_reason(
    folder: Path, cache: ModelCache, changes: dict[str, object], word: str
) -> None:
    edit(folder / "config.json", **changes)
    assert word in refusal(folder, cache)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b"[" * 200_000, b" " * (1 << 24) + b"{}"])
def test_broken_json_is_refused_by_name(folder: Path, cache: ModelCache, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    assert "config.json" in refusal(folder, cache)


def test_missing_parts_are_named(folder: Path, cache: ModelCache) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle" in refusal(folder, cache)
    (folder / "pytorch_model.bin").unlink()
    assert "*.safetensors" in refusal(folder, cache)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(folder, cache)
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder, cache)
    assert "Qwen/Qwen3-0.6B" in refusal("Qwen/Qwen3-0.6B", cache)
    other = folder / "model.onnx"
    other.write_bytes(b"x")
    assert ".onnx" in refusal(other, cache)


def test_models_are_listed_with_their_state(tmp_path: Path, cache: ModelCache) -> None:
    (bundled,) = list_models(cache)
    assert (bundled.name, bundled.state, bundled.size) == ("smollm2-135m-instruct", "installed", 98_362_432)
    assert (bundled.converted, bundled.used) == (0, None)
    metadata, tensors = tiny_model()
    source = resolve(str(write(tmp_path / "m.gguf", metadata, tensors)), cache)
    size = source.tokenizer_path().stat().st_size
    _, converted = list_models(cache)
    assert (converted.name, converted.state, converted.converted) == ("m", "", size)
    assert converted.used == pytest.approx(time.time(), abs=60)


def test_a_pulled_model_and_its_conversion_are_one_line(cache: ModelCache) -> None:
    write_tiny_model(cache.root / "hub" / "owner--tiny")
    source = resolve("owner/tiny", cache)
    cache.publish(f"{source.digest}/weights", lambda draft: draft.write_bytes(bytes(7)) and None)
    _, tiny = list_models(cache)
    assert (tiny.name, tiny.state, tiny.converted, tiny.where) == ("owner/tiny", "pulled", 7, source.path)


def test_two_models_of_one_name_are_two_lines(cache: ModelCache) -> None:
    for digest in ("a" * 64, "b" * 64):
        cache.note_name(digest, "model")
        cache.publish(f"{digest}/weights", lambda draft: draft.write_bytes(bytes(1000)) and None)
    assert [entry.digest for entry in list_models(cache) if entry.name == "model"] == ["a" * 64, "b" * 64]


def test_reading_everything_but_tensors_imports_neither_numpy_nor_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from headway.modelfile.cache import ModelCache
from headway.modelfile.source import resolve
from headway.text import chat, detok, stop, tokenizer
source = resolve("smollm2", ModelCache(Path({str(tmp_path)!r})))
made = tokenizer.Tokenizer.open(source.tokenizer_path())
assert made.encode("Hello, world!") == [19556, 28, 905, 17]
bad = [name for name in ("numpy", "torch", "transformers", "msgspec", "jinja2") if name in sys.modules]
assert not bad, bad
next(iter(source.tensors()))
assert "numpy" in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_a_file_of_another_kind_is_called_what_it_is_not(cache: ModelCache) -> None:
    assert refusal("/etc/passwd", cache).startswith(
        "/etc/passwd is not a .gguf file; allowed: a .gguf file, a directory"
    )
