"""Granite 3, dense: Llama with multipliers for embeddings, residuals, scores and logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_real, read_spec

ARCHITECTURES = ("GraniteForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return replace(
        read_spec(config, "granite"),
        embed_scale=read_real(config, "embedding_multiplier", 1.0),
        residual_scale=read_real(config, "residual_multiplier", 1.0),
        attn_scale=read_real(config, "attention_multiplier", 1.0),
        logit_scale=1.0 / read_real(config, "logits_scaling", 1.0),
    )


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
