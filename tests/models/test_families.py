"""Every family on tiny random weights against transformers' own logits."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headway.kernels.ops import KernelSet
from headway.models.decoder import Decoder
from headway.models.native import NativeDecoder, make_decoder
from headway.models.params import ModelWeights
from headway.models.registry import read_config
from headway.runner.weights import pack_weights
from tiny_models import Driver, kernel_sets, logits_alone

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * place for place in range(6)],
    "long_factor": [2.0 + place for place in range(6)],
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
GEMMA = {"head_dim": 24, "sliding_window": 40, "query_pre_attn_scalar": 20, "num_hidden_layers": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"head_dim": 24}),
    "mistral window": ("Mistral", {"sliding_window": 100}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2 late windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window_pattern": 3, "rope_parameters": GEMMA3_ROPE}),
    "gemma3 capped logits": ("Gemma3Text", {**GEMMA, "final_logit_softcapping": 2.0}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"sliding_window": 50, "pad_token_id": 0}),
    "phi3 longrope": ("Phi3", {"rope_parameters": LONGROPE, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "qwen3 experts": ("Qwen3Moe", EXPERTS),
    "qwen3 experts, normed": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
}
SETS = {kernels.name: kernels for kernels in kernel_sets()}


def build(case: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """transformers' model with random weights, norms and biases included; its config and tensors as files hold them."""
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes}, attn_implementation="eager")
    torch.manual_seed(7)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                value.add_(torch.randn_like(value) * 0.3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = json.loads((Path(folder) / "config.json").read_text())
        tensors = {name: value.numpy() for name, value in load_file(Path(folder) / "model.safetensors").items()}
    return model, stored, tensors


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, kernels: KernelSet) -> None:
    model, config, tensors = build(case)
    spec = read_config(config)
    weights = ModelWeights(dict(pack_weights(tensors.items(), spec, kernels)), kernels.layout)
    decoder = make_decoder(spec, weights, kernels)
    assert isinstance(decoder, NativeDecoder) == (kernels.native is not None and not spec.experts)
    tokens = torch.randint(0, spec.vocab_size, (min(spec.max_len, 200),))
    with torch.inference_mode():
        wanted = model(tokens[None]).logits[0]
    got = logits_alone(decoder, tokens.tolist())
    assert got.dtype == torch.float32
    assert wanted.abs().max() > 1
    assert (got - wanted).abs().max() <= 1e-4


def test_only_sampled_tokens_get_logits() -> None:
    _, config, tensors = build("llama")
    spec, kernels = read_config(config), next(iter(SETS.values()))
    decoder = Decoder(spec, ModelWeights(dict(pack_weights(tensors.items(), spec, kernels)), kernels.layout), kernels)
    driver = Driver(decoder)
    tokens = list(range(20))
    batch = driver.batch([(driver.add(tokens), 20)])
    picked = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "sample_index"},
        sample_index=np.array([19, 3, 3]),
    )
    logits = decoder.forward(picked, driver.kv)
    assert np.array_equal(logits, logits_alone(decoder, tokens)[[19, 3, 3]])
