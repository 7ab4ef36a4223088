"""Mixtral: Mistral whose MLP is a choice of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.models.params import Parameter, Part, decoder_parameters
from headway.models.spec import MAX_EXPERTS, Config, ModelSpec, read_int, read_spec, read_window

ARCHITECTURES = ("MixtralForCausalLM",)
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def spec(config: Config) -> ModelSpec:
    return replace(
        read_spec(config, "mixtral", windows=read_window(config)),
        experts=read_int(config, "num_local_experts", top=MAX_EXPERTS),
        experts_per_token=read_int(config, "num_experts_per_tok", top=MAX_EXPERTS),
    )


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    for parameter in decoder_parameters(spec):
        yield replace(parameter, parts=tuple(Part(_name(part.source), part.rows) for part in parameter.parts))


def _name(source: str) -> str:
    layer, is_mlp, rest = source.partition(".mlp.")
    if not is_mlp:
        return source
    for theirs, ours in NAMES.items():
        rest = rest.replace(theirs, ours)
    return f"{layer}.block_sparse_moe.{rest}"
