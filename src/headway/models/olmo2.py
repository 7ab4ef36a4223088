"""OLMo 2: norms behind attention and MLP, and one over all query heads together, one over all key heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_spec

ARCHITECTURES = ("Olmo2ForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return replace(read_spec(config, "olmo2", qk_norm=True), qk_norm_is_wide=True, norms="behind")


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
