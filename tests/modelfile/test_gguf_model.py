"""What GGUF metadata and tensors mean as a Hugging Face config and checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from gguf_files import tiny_model, write
from headway.errors import ModelFormatError
from headway.modelfile.bundled import SMOLLM2, locate
from headway.modelfile.cache import ModelCache
from headway.modelfile.gguf import GGUFFile
from headway.modelfile.gguf_model import hf_config, iter_tensors, unpermute
from headway.models.registry import read_config


def config_of(path: Path, metadata: dict[str, object], tensors: dict[str, np.ndarray]) -> dict[str, object]:
    with GGUFFile.open(write(path / "m.gguf", metadata, tensors)) as file:
        return hf_config(file)


def refusal(path: Path, metadata: dict[str, object], tensors: dict[str, np.ndarray]) -> str:
    with pytest.raises(ModelFormatError) as caught:
        config_of(path, metadata, tensors)
    return str(caught.value)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of query and key projections."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_config_of_the_bundled_model(tmp_path: Path) -> None:
    path = locate(SMOLLM2, ModelCache(tmp_path))
    assert path is not None
    with GGUFFile.open(path) as file:
        config = hf_config(file)
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("arch", "class_name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_every_family_has_its_class_and_all_its_tensors(tmp_path: Path, arch: str, class_name: str) -> None:
    metadata, tensors = tiny_model(arch)
    with GGUFFile.open(write(tmp_path / "m.gguf", metadata, tensors)) as file:
        config = hf_config(file)
        assert config["architectures"] == [class_name]
        assert read_config(config).qkv_bias == (arch == "qwen2")
        names = [name for name, _ in iter_tensors(file)]
    assert len(names) == len(set(names)) == len(tensors)
    assert ("model.layers.1.self_attn.q_proj.bias" in names) == (arch == "qwen2")
    assert ("model.layers.1.self_attn.k_norm.weight" in names) == (arch == "qwen3")
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"} < set(names)


def test_untied_head_is_found(tmp_path: Path) -> None:
    metadata, tensors = tiny_model(tied=False)
    with GGUFFile.open(write(tmp_path / "m.gguf", metadata, tensors)) as file:
        assert hf_config(file)["tie_word_embeddings"] is False
        np.testing.assert_array_equal(dict(iter_tensors(file))["lm_head.weight"], tensors["output.weight"])


def test_llama_rows_come_back_in_checkpoint_order(tmp_path: Path) -> None:
    metadata, tensors = tiny_model("llama")
    wanted_q, wanted_k = tensors["blk.1.attn_q.weight"], tensors["blk.1.attn_k.weight"]
    stored = {**tensors, "blk.1.attn_q.weight": interleave(wanted_q, 4), "blk.1.attn_k.weight": interleave(wanted_k, 2)}
    with GGUFFile.open(write(tmp_path / "m.gguf", metadata, stored)) as file:
        got = dict(iter_tensors(file))
    np.testing.assert_array_equal(got["model.layers.1.self_attn.q_proj.weight"], wanted_q)
    np.testing.assert_array_equal(got["model.layers.1.self_attn.k_proj.weight"], wanted_k)
    np.testing.assert_array_equal(got["model.layers.1.self_attn.v_proj.weight"], tensors["blk.1.attn_v.weight"])


def test_qwen_rows_are_left_alone(tmp_path: Path) -> None:
    metadata, tensors = tiny_model("qwen2")
    with GGUFFile.open(write(tmp_path / "m.gguf", metadata, tensors)) as file:
        got = dict(iter_tensors(file))
    np.testing.assert_array_equal(got["model.layers.0.self_attn.q_proj.weight"], tensors["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(got["model.layers.0.self_attn.q_proj.bias"], tensors["blk.0.attn_q.bias"])


def test_unpermute_undoes_the_converter_on_biases_too() -> None:
    bias = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(unpermute(interleave(bias, 2), 2), bias)


def test_llama3_rope_is_recognised_from_its_stored_divisors(tmp_path: Path) -> None:
    metadata, tensors = tiny_model("llama", head_dim=32)
    metadata["llama.rope.freq_base"] = 500000.0
    divisors = []
    for index in range(16):
        wavelength = 2 * math.pi * 500000.0 ** (index / 16)
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / 32 + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else 32.0 if wavelength > 8192 else between)
    assert any(1.0 < divisor < 32.0 for divisor in divisors)
    stored = {**tensors, "rope_freqs.weight": np.array(divisors, np.float32)}
    assert config_of(tmp_path, metadata, stored)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stored["rope_freqs.weight"] = np.linspace(1, 32, 16, dtype=np.float32)
    assert "rotary" in refusal(tmp_path, metadata, stored)


def test_linear_scaling_and_window_are_passed_on(tmp_path: Path) -> None:
    metadata, tensors = tiny_model("llama")
    metadata |= {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 32,
    }
    config = config_of(tmp_path, metadata, tensors)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["sliding_window"] == 32


@pytest.mark.parametrize(
    ("key", "item", "word"),
    [
        ("general.architecture", "gemma3", "gemma3"),
        ("llama.expert_count", 8, "experts"),
        ("llama.block_count", 2**31, "block_count"),
        ("llama.embedding_length", "16", "embedding_length"),
        ("llama.attention.head_count", 0, "head_count"),
        ("llama.attention.head_count_kv", [2, 2], "head_count_kv"),
        ("llama.rope.dimension_count", 2, "dimension_count"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.rope.freq_base", -1.0, "freq_base"),
        ("llama.feed_forward_length", 25, "ffn_gate"),
    ],
)
def test_metadata_we_cannot_run_are_refused_by_name(tmp_path: Path, key: str, item: object, word: str) -> None:
    metadata, tensors = tiny_model("llama")
    assert word in refusal(tmp_path, {**metadata, key: item}, tensors)


def test_missing_and_foreign_tensors_are_refused_by_name(tmp_path: Path) -> None:
    metadata, tensors = tiny_model("qwen3")
    for name in ("blk.1.attn_q_norm.weight", "blk.0.ffn_up.weight", "token_embd.weight", "output_norm.weight"):
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        assert name in refusal(tmp_path, metadata, rest)
    assert "attn_sinks" in refusal(tmp_path, metadata, {**tensors, "blk.0.attn_sinks": np.ones(8, np.float32)})
