"""What GGUF files of each architecture call their tensors and their numbers, and what a config.json calls them.

One entry for each architecture; an architecture that differs from the usual one differs here, in data. Reading and
checking is done by `gguf_model`; how a model computes is said in `headway.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Layer = Mapping[str, tuple[str, tuple[str, ...]]]
"""Name in the file, behind `blk.N.` -> (name in a checkpoint, behind `model.layers.N.`; its sizes by name)."""

_MATRICES: Layer = {
    "attn_q.weight": ("self_attn.q_proj.weight", ("queries", "width")),
    "attn_k.weight": ("self_attn.k_proj.weight", ("keys", "width")),
    "attn_v.weight": ("self_attn.v_proj.weight", ("keys", "width")),
    "attn_output.weight": ("self_attn.o_proj.weight", ("width", "queries")),
    "ffn_gate.weight": ("mlp.gate_proj.weight", ("inner", "width")),
    "ffn_up.weight": ("mlp.up_proj.weight", ("inner", "width")),
    "ffn_down.weight": ("mlp.down_proj.weight", ("width", "inner")),
}
_NORMS: Layer = {
    "attn_norm.weight": ("input_layernorm.weight", ("width",)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", ("width",)),
}
_BIASES: Layer = {
    "attn_q.bias": ("self_attn.q_proj.bias", ("queries",)),
    "attn_k.bias": ("self_attn.k_proj.bias", ("keys",)),
    "attn_v.bias": ("self_attn.v_proj.bias", ("keys",)),
}
_OUT_BIAS: Layer = {"attn_output.bias": ("self_attn.o_proj.bias", ("width",))}
_HEAD_NORMS: Layer = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", ("head",)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", ("head",)),
}
_WIDE_NORMS: Layer = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", ("queries",)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", ("keys",)),
}
_OUT_NORMS: Layer = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", ("width",)),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", ("width",)),
}
_AROUND: Layer = {
    "attn_norm.weight": ("input_layernorm.weight", ("width",)),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", ("width",)),
    **_OUT_NORMS,
}
_FUSED: Layer = {
    "attn_qkv.weight": ("self_attn.qkv_proj.weight", ("fused", "width")),
    "attn_output.weight": _MATRICES["attn_output.weight"],
    "ffn_up.weight": ("mlp.gate_up_proj.weight", ("gate and up", "width")),
    "ffn_down.weight": _MATRICES["ffn_down.weight"],
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How the files of one architecture are read."""

    class_name: str  # its architecture in a config.json
    needed: Layer = field(default_factory=lambda: {**_NORMS, **_MATRICES})
    optional: Layer = field(default_factory=lambda: {**_BIASES, **_OUT_BIAS, **_HEAD_NORMS})
    numbers: Mapping[str, str] = field(default_factory=dict)  # metadata behind the architecture's name -> config
    config: Mapping[str, object] = field(default_factory=dict)  # what every such model has
    norm_offset: float = 0.0  # that the converter added to the weights of norms
    is_permuted: bool = False  # the converter put rows of queries and keys in another order
    rotates_part: bool = False  # of a head, as rope.dimension_count says
    large_layers: tuple[int, ...] = ()  # of models whose scores are scaled by width / heads, not by the size of a head


_GELU: Mapping[str, object] = {"hidden_activation": "gelu_pytorch_tanh"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_MLP_BIAS: Mapping[str, object] = {"mlp_bias": False}

KINDS: Mapping[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", config=_MLP_BIAS, is_permuted=True),
    "mistral": Kind("MistralForCausalLM", config=_MLP_BIAS),
    "qwen2": Kind("Qwen2ForCausalLM", {**_NORMS, **_MATRICES, **_BIASES}, {**_OUT_BIAS, **_HEAD_NORMS}),
    "qwen3": Kind("Qwen3ForCausalLM", {**_NORMS, **_MATRICES, **_HEAD_NORMS}, {**_BIASES, **_OUT_BIAS}),
    "gemma2": Kind(
        "Gemma2ForCausalLM", {**_AROUND, **_MATRICES}, {}, _CAPS, _GELU, norm_offset=1.0, large_layers=(46,)
    ),
    "gemma3": Kind(
        "Gemma3ForCausalLM",
        {**_AROUND, **_MATRICES, **_HEAD_NORMS},
        {},
        {"final_logit_softcapping": "final_logit_softcapping"},
        {**_GELU, "model_type": "gemma3_text"},
        norm_offset=1.0,
        large_layers=(62,),
    ),
    "phi3": Kind("Phi3ForCausalLM", {**_NORMS, **_FUSED}, {}, rotates_part=True),
    "olmo2": Kind("Olmo2ForCausalLM", {**_OUT_NORMS, **_WIDE_NORMS, **_MATRICES}, {}),
    "granite": Kind("GraniteForCausalLM", {**_NORMS, **_MATRICES}, {}, _MULTIPLIERS, is_permuted=True),
}
"""`general.architecture` -> how it is read."""
