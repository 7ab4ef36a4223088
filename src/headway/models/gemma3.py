"""Gemma 3, text: Gemma 2 without caps, with a norm over every head, and rotary embeddings of two bases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from headway.models.gemma2 import gemma_spec
from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_real

ARCHITECTURES = ("Gemma3ForCausalLM",)


def spec(config: Config) -> ModelSpec:
    # Its attention has no cap, whatever a config says.
    flat, local = _flat_rope({"rope_theta": 1e6, **config, "attn_logit_softcapping": None})
    base = gemma_spec(flat, "gemma3", 6)
    return replace(base, qk_norm=True, window_rope_theta=local if base.windows else 0.0)


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)


def _flat_rope(config: Config) -> tuple[Config, float]:
    """The config with the rotary embeddings of layers that see everything, and the base of those with a window."""
    rope = config.get("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(rope, Mapping) or not any(kind in rope for kind in kinds):
        return config, read_real(config, "rope_local_base_freq", 10000.0)
    full, local = (rope.get(kind) or {} for kind in kinds)
    theta = read_real(local, "rope_theta", 10000.0) if isinstance(local, Mapping) else 10000.0
    return {**config, "rope_parameters": full}, theta
