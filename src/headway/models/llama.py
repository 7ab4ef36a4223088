"""Llama 2 and 3, SmolLM2 and everything else that calls itself LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Iterator

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_spec

ARCHITECTURES = ("LlamaForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return read_spec(config, "llama")


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
