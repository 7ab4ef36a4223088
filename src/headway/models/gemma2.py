"""Gemma 2: norms around attention and MLP, GELU, caps on scores and logits, a window in every second layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_bool, read_pattern, read_real, read_spec

ARCHITECTURES = ("Gemma2ForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return gemma_spec({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}, "gemma2", 2)


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)


def gemma_spec(config: Config, family: str, full_each: int) -> ModelSpec:
    """What the Gemmas share; one layer of so many sees everything, unless the config says which do."""
    # The defaults of the family, which its checkpoints may leave out.
    config = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **config}
    base = read_spec(config, family, windows=read_pattern(config, full_each=full_each))
    scalar = read_real(config, "query_pre_attn_scalar", 256.0)
    return replace(
        base,
        tie_embeddings=read_bool(config, "tie_word_embeddings", True),
        norms="around",
        norm_offset=1.0,
        embed_scale=math.sqrt(base.hidden),
        attn_scale=scalar**-0.5,
        attn_cap=_read_cap(config, "attn_logit_softcapping"),
        logit_cap=_read_cap(config, "final_logit_softcapping"),
    )


def _read_cap(config: Config, key: str) -> float:
    return 0.0 if config.get(key) is None else read_real(config, key)
