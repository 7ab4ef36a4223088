"""Qwen 3, dense: Llama with a norm over every query and key head, no biases, and a head size of its own."""

from __future__ import annotations

from collections.abc import Iterator

from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_late_windows, read_spec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec(config: Config) -> ModelSpec:
    # The family's own default, which its checkpoints may leave out.
    return read_spec({"head_dim": 128, **config}, "qwen3", qk_norm=True, windows=read_late_windows(config))


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
