"""Every family on tiny random weights against transformers' own logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headway.kernels.ops import KernelSet
from headway.models.decoder import Decoder
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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"head_dim": 24}),
    "mistral window": ("Mistral", {"sliding_window": 100}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
SETS = {kernels.name: kernels for kernels in kernel_sets()}


def build(case: str) -> tuple[Any, dict[str, Any]]:
    """transformers' model with random weights, norms and biases included, and its config as a file holds it."""
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                value.add_(torch.randn_like(value) * 0.3)
    return model, {**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}


@pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)
@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, kernels: KernelSet) -> None:
    model, config = build(case)
    spec = read_config(config)
    arrays = ((name, value.numpy()) for name, value in model.state_dict().items())
    decoder = Decoder(spec, ModelWeights(dict(pack_weights(arrays, spec, kernels)), kernels.layout), kernels)
    tokens = torch.randint(0, spec.vocab_size, (min(spec.max_len, 200),))
    with torch.inference_mode():
        wanted = model(tokens[None]).logits[0]
    got = logits_alone(decoder, tokens.tolist())
    assert got.dtype == torch.float32
    assert wanted.abs().max() > 1
    assert (got - wanted).abs().max() <= 1e-4


def test_only_sampled_tokens_get_logits() -> None:
    model, config = build("llama")
    spec, kernels = read_config(config), next(iter(SETS.values()))
    arrays = ((name, value.numpy()) for name, value in model.state_dict().items())
    decoder = Decoder(spec, ModelWeights(dict(pack_weights(arrays, spec, kernels)), kernels.layout), kernels)
    driver = Driver(decoder)
    tokens = list(range(20))
    batch = driver.batch([(driver.add(tokens), 20)])
    picked = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "sample_index"},
        sample_index=np.array([19, 3, 3]),
    )
    logits = decoder.forward(picked, driver.kv)
    assert np.array_equal(logits, logits_alone(decoder, tokens)[[19, 3, 3]])
