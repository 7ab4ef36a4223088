"""Qwen 3 with experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.errors import ModelFormatError
from headway.models.params import Parameter, decoder_parameters
from headway.models.spec import MAX_EXPERTS, Config, ModelSpec, read_bool, read_int, read_spec, read_window

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def spec(config: Config) -> ModelSpec:
    for key, allowed in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(key) not in (None, allowed):
            got = repr(config[key])[:80]
            raise ModelFormatError(f"the model's config has {key} = {got}; allowed: {allowed}, experts in every layer")
    windows = read_window(config) if read_bool(config, "use_sliding_window", False) else ()
    # The family's own defaults, which its checkpoints may leave out.
    own = {"head_dim": 128, **config, "intermediate_size": read_int(config, "moe_intermediate_size")}
    return replace(
        read_spec(own, "qwen3_moe", qk_norm=True, windows=windows),
        experts=read_int({"num_experts": config.get("num_local_experts"), **config}, "num_experts", top=MAX_EXPERTS),
        experts_per_token=read_int(config, "num_experts_per_tok", top=MAX_EXPERTS),
        are_experts_normed=read_bool(config, "norm_topk_prob", False),
    )


def weights(spec: ModelSpec) -> Iterator[Parameter]:
    return decoder_parameters(spec)
