"""GGUF files of every architecture, written as its converter writes them: the model of the checkpoint comes back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import write
from headway.errors import ModelFormatError
from headway.modelfile.gguf import GGUFFile
from headway.modelfile.gguf_model import hf_config, iter_tensors
from headway.models.registry import parameters, read_config

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "tie_word_embeddings": True,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
POST = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, object]]] = {
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 12,
            "sliding_window": 40,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"attention.sliding_window": 40, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 12,
            "sliding_window": 40,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"attention.sliding_window": 40, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": ("phi3", "Phi3ForCausalLM", {"sliding_window": 100}, {"attention.sliding_window": 100}),
    "phi3, part of a head rotates": (
        "phi3",
        "Phi3ForCausalLM",
        {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE},
        {
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
    ),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", {"tie_word_embeddings": False}, {}),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 8.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.125, "logit_scale": 8.0},
    ),
}


def name_in_file(arch: str, name: str) -> str:
    usual = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in usual:
        return f"{usual[stem]}.weight"
    _, _, layer, rest = name.split(".", 3)
    names = NAMES if arch in ("phi3", "granite") else {**NAMES, **POST}
    return f"blk.{layer}.{names[rest]}"


def as_stored(arch: str, name: str, tensor: np.ndarray) -> np.ndarray:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
    if arch != "granite" or not heads:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])  # pairs to rotate become neighbours
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def model_of(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, object], dict[str, np.ndarray]]:
    """A config and tensors as a checkpoint has them, then metadata and tensors as a GGUF file has them."""
    arch, class_name, own, stored = CASES[case]
    config = {**BASE, "architectures": [class_name], **own}
    rng = np.random.default_rng(3)
    shapes = {part.source: param.part_shape(part) for param in parameters(read_config(config)) for part in param.parts}
    # Multiples of a power of two, which adding 1 leaves exact.
    tensors = {name: rng.integers(-999, 999, shape).astype(np.float32) / 1024 for name, shape in shapes.items()}
    metadata: dict[str, object] = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 32,
        f"{arch}.feed_forward_length": 48,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.key_length": 12,
        f"{arch}.attention.value_length": 12,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 50000.0,
        **{f"{arch}.{key}": value for key, value in stored.items()},
    }
    file = {name_in_file(arch, name): as_stored(arch, name, tensor) for name, tensor in tensors.items()}
    if "rope_scaling" in own and arch == "phi3":
        for kind in ("short", "long"):
            file[f"rope_factors_{kind}.weight"] = np.array(LONGROPE[f"{kind}_factor"], np.float32)
    return config, tensors, metadata, file


@pytest.mark.parametrize("case", CASES)
def test_the_model_of_the_checkpoint_comes_back(case: str, tmp_path: Path) -> None:
    config, tensors, metadata, stored = model_of(case)
    with GGUFFile.open(write(tmp_path / "m.gguf", metadata, stored)) as file:
        spec, wanted = read_config(hf_config(file)), read_config(config)
        got = dict(iter_tensors(file))
    if wanted.rope_scaling is not None:
        assert spec.rope_scaling is not None
        assert spec.rope_scaling.amplitude == pytest.approx(wanted.rope_scaling.amplitude, rel=1e-6)
        wanted = replace(wanted, rope_scaling=replace(wanted.rope_scaling, amplitude=spec.rope_scaling.amplitude))
    assert spec == wanted
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


def test_the_largest_gemmas_scale_scores_by_width(tmp_path: Path) -> None:
    _, _, metadata, _ = model_of("gemma2")
    config = {**BASE, "num_hidden_layers": 46, "architectures": ["Gemma2ForCausalLM"]}
    shapes = {part.source: param.part_shape(part) for param in parameters(read_config(config)) for part in param.parts}
    stored = {name_in_file("gemma2", name): np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with GGUFFile.open(write(tmp_path / "m.gguf", {**metadata, "gemma2.block_count": 46}, stored)) as file:
        assert hf_config(file)["query_pre_attn_scalar"] == 32 // 4


@pytest.mark.parametrize(
    ("case", "key", "value", "words"),
    [
        ("granite", "residual_scale", -1.0, r"granite.residual_scale is -1.0; allowed: a number from 0"),
        ("granite", "residual_scale", "1", r"allowed: a number from 0"),
        ("phi3", "rope.dimension_count", 13, r"allowed: an integer from 2 to 12"),
        ("olmo2", "rope.dimension_count", 6, r"rope.dimension_count is 6; allowed: 12"),
        ("gemma3", "expert_count", 4, r"mixture of experts; allowed: dense models"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(case: str, key: str, value: object, words: str, tmp_path: Path) -> None:
    _, _, metadata, stored = model_of(case)
    metadata[f"{metadata['general.architecture']}.{key}"] = value
    with (
        GGUFFile.open(write(tmp_path / "m.gguf", metadata, stored)) as file,
        pytest.raises(ModelFormatError, match=words),
    ):
        hf_config(file)


def test_a_norm_that_is_missing_is_named(tmp_path: Path) -> None:
    _, _, metadata, stored = model_of("gemma3")
    del stored["blk.3.post_ffw_norm.weight"]
    with (
        GGUFFile.open(write(tmp_path / "m.gguf", metadata, stored)) as file,
        pytest.raises(ModelFormatError, match=r"no tensor 'blk.3.post_ffw_norm.weight', which its architecture needs"),
    ):
        hf_config(file)
