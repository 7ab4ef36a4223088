"""Sizes of well-known models, by name: for measuring speed with made-up weights, where no checkpoint is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.errors import ConfigError
from headway.models.spec import ModelSpec

SHAPES: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "llama-3.1-8b": ModelSpec(
            family="llama",
            vocab_size=128_256,
            hidden=4096,
            intermediate=14_336,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            norm_eps=1e-5,
            rope_theta=500_000.0,
            max_len=8192,
        ),
        "llama-3.2-1b": ModelSpec(
            family="llama",
            vocab_size=128_256,
            hidden=2048,
            intermediate=8192,
            layers=16,
            heads=32,
            kv_heads=8,
            head_dim=64,
            norm_eps=1e-5,
            rope_theta=500_000.0,
            max_len=8192,
            tie_embeddings=True,
        ),
        "smollm2-135m": ModelSpec(
            family="llama",
            vocab_size=49_152,
            hidden=576,
            intermediate=1536,
            layers=30,
            heads=9,
            kv_heads=3,
            head_dim=64,
            norm_eps=1e-5,
            rope_theta=100_000.0,
            max_len=8192,
            tie_embeddings=True,
        ),
    }
)


def shape_of(name: str) -> ModelSpec:
    """The spec of that name; ConfigError if there is none."""
    if name not in SHAPES:
        raise ConfigError(f"there is no model shape {name!r}; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]
