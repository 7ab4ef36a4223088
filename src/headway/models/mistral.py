"""Mistral: Llama, in its first version with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_spec, read_window

ARCHITECTURES = ("MistralForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return read_spec(config, "mistral", windows=read_window(config))


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
