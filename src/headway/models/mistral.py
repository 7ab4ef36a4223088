"""Mistral. A sliding window shorter than the context cuts the context to it.

Within the window a sliding and a plain attention see the same keys, so a cut context computes exactly what the model
means. headway does not keep tokens beyond the window.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_spec, read_window

ARCHITECTURES = ("MistralForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return read_spec(config, "mistral", window=read_window(config))


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
