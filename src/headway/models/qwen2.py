"""Qwen 2 and 2.5: Llama with biases on q, k and v, and a sliding window that is off unless asked for."""

from __future__ import annotations

from collections.abc import Iterator

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_late_windows, read_spec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def spec(config: Config) -> ModelSpec:
    return read_spec(config, "qwen2", qkv_bias=True, windows=read_late_windows(config))


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
