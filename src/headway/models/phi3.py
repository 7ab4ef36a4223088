"""Phi 3 and 4: Llama whose checkpoints keep q, k, v and gate, up as one tensor each; a part of a head may rotate.

Rotary embeddings of long contexts ("longrope") are those of the original context, to which the context is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.models.params import Parameter, Part, decoder_parameters
from headway.models.spec import Config, ModelSpec, read_spec, read_window

ARCHITECTURES = ("Phi3ForCausalLM",)
FUSED = {"qkv": "self_attn.qkv_proj.weight", "gate_up": "mlp.gate_up_proj.weight"}


def spec(config: Config) -> ModelSpec:
    return read_spec(config, "phi3", windows=read_window(config), may_rotate_part=True)


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    for parameter in decoder_parameters(spec):
        layer, _, name = parameter.name.rpartition(".")
        if name in FUSED:
            yield replace(parameter, parts=(Part(f"model.{layer}.{FUSED[name]}", parameter.rows),))
        else:
            yield parameter
