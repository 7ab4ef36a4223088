"""Configs become specs; hostile, broken and unsupported ones become one clear error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, ModelFormatError
from headway.models.registry import families, parameters, read_config
from headway.models.spec import RopeScaling, beyond

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_defaults_follow_the_format() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    spec = read_config(config)
    assert (spec.kv_heads, spec.head_dim, spec.rope_theta, spec.tie_embeddings) == (4, 16, 10000.0, False)
    assert spec.kv_bytes_per_token == 2 * 2 * 4 * 16 * 4


def test_every_family_file_is_found() -> None:
    names = (
        "Llama",
        "Mistral",
        "Qwen2",
        "Qwen3",
        "Gemma2",
        "Gemma3",
        "Phi3",
        "Olmo2",
        "Granite",
        "Mixtral",
        "Qwen3Moe",
    )
    assert {f"{name}ForCausalLM" for name in names} <= families().keys()


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", ["GPT2LMHeadModel"], [7], {"a": 1}])
def test_unknown_architecture_names_the_known_ones(named: object) -> None:
    with pytest.raises(ModelFormatError, match="LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM"):
        read_config({**LLAMA, "architectures": named})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -64),
        ("hidden_size", True),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("hidden_size", 10**9),
        ("hidden_size", 66),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("head_dim", 15),
        ("head_dim", 10**6),
        ("vocab_size", 10**12),
        ("intermediate_size", None),
        ("max_position_embeddings", [256]),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", float("inf")),
        ("rope_theta", -1.0),
        ("tie_word_embeddings", 1),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", "llama3"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": ["linear"]}),
        ("rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}),
    ],
)
def test_bad_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelFormatError):
        read_config({**LLAMA, key: value})


MORE = (
    *(
        "head_dim",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "rope_parameters",
        "layer_types",
        "hidden_activation",
    ),
    *("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "final_logit_softcapping", "logits_scaling"),
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "partial_rotary_factor"),
)
JUNK = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from([*LLAMA, *MORE]), JUNK))
def test_nothing_but_a_format_error_escapes(changes: dict[str, object]) -> None:
    for family in families():
        try:
            spec = read_config({**LLAMA, **changes, "architectures": [family]})
        except ModelFormatError:
            continue
        assert spec.heads % spec.kv_heads == 0


def test_rope_is_read_from_either_place() -> None:
    old = read_config({**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3})
    new = read_config({**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert read_config({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope_theta == 7.0


def test_a_window_shorter_than_the_context_is_one() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert read_config({**mistral, "sliding_window": 100}).windows == (100, 100)
    assert read_config({**mistral, "sliding_window": 4096}).windows == ()
    assert read_config({**mistral, "sliding_window": None}).windows == ()
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen = {**LLAMA, "architectures": [name], "sliding_window": 100}
        assert read_config(qwen).windows == ()
        assert read_config({**qwen, "use_sliding_window": True}).windows == ()  # from layer 28 on
        assert read_config({**qwen, "use_sliding_window": True, "max_window_layers": 1}).windows == (0, 100)


GEMMA3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 32,
}


def test_layers_have_windows_by_pattern_or_by_name() -> None:
    assert read_config(GEMMA3).windows == (32, 32, 32, 32, 32, 0)
    assert read_config({**GEMMA3, "sliding_window_pattern": 2}).windows == (32, 0) * 3
    kinds = ["full_attention", *["sliding_attention"] * 5]
    spec = read_config({**GEMMA3, "layer_types": kinds})
    assert [spec.window(layer) for layer in range(6)] == [0, 32, 32, 32, 32, 32]
    for wrong in (["sliding_attention"] * 5, ["chunked_attention"] * 6, "sliding_attention", [[]] * 6):
        with pytest.raises(ModelFormatError, match="allowed: 6 of sliding_attention, full_attention"):
            read_config({**GEMMA3, "layer_types": wrong})


def test_gemma_rotates_as_old_and_new_configs_say() -> None:
    old = {**GEMMA3, "rope_theta": 5e5, "rope_local_base_freq": 700.0, "rope_scaling": {"type": "linear", "factor": 8}}
    spec = read_config(old)
    assert (spec.rope_theta, spec.window_rope_theta, spec.rope_scaling) == (5e5, 700.0, RopeScaling("linear", 8.0))
    full = {"rope_type": "linear", "factor": 8, "rope_theta": 5e5}
    nested = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
    assert read_config({**GEMMA3, "rope_parameters": nested}) == spec
    assert read_config({**GEMMA3, "sliding_window": None}).window_rope_theta == 0.0


def test_a_context_cut_to_its_window_needs_none() -> None:
    windowed = read_config({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 100})
    cut = windowed.cut_to_window()
    assert (cut.windows, cut.max_len) == ((), 100)
    assert cut.cut_to_window() is cut
    late = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}
    cut = read_config({**late, "sliding_window": 80}).cut_to_window()
    assert (cut.windows, cut.max_len) == ((), 80)
    gemma = read_config(GEMMA3)
    assert gemma.cut_to_window() is gemma, "its layers rotate by two bases"
    alike = read_config({**GEMMA3, "layer_types": ["sliding_attention"] * 6}).cut_to_window()
    assert (alike.windows, alike.max_len, alike.rope_theta, alike.window_rope_theta) == ((), 32, 10000.0, 0.0)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}


def test_longrope_cuts_the_context_to_the_original_one() -> None:
    spec = read_config({**PHI3, "original_max_position_embeddings": 64})
    assert (spec.max_len, spec.rotary_dim) == (64, 12)
    assert spec.rope_scaling is not None
    assert (spec.rope_scaling.kind, spec.rope_scaling.divisors) == ("divided", (1.0,) * 6)
    assert spec.rope_scaling.amplitude == pytest.approx((1 + 2 / 6) ** 0.5)
    for wrong in ([1.0] * 5, [0.0] * 6, ["1"] * 6, None):
        changed = {**PHI3, "original_max_position_embeddings": 64, "rope_scaling": {**LONGROPE, "short_factor": wrong}}
        with pytest.raises(ModelFormatError, match="short_factor"):
            read_config(changed)
    with pytest.raises(ModelFormatError, match="original_max_position_embeddings"):
        read_config(PHI3)


MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        {**MIXTRAL, "num_experts_per_tok": 5},
        {**MIXTRAL, "num_local_experts": 0},
        {**MIXTRAL, "num_local_experts": 10**6},
        {**MIXTRAL, "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8, "decoder_sparse_step": 2},
        {**MIXTRAL, "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8, "mlp_only_layers": [1]},
        {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": -1},
        {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0},
        {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"},
        {**LLAMA, "architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
        {**PHI3, "rope_scaling": None, "partial_rotary_factor": 0.45},
    ],
)
def test_bad_variants_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError):
        read_config(config)


def test_what_a_decoder_does_not_know_is_named() -> None:
    spec = read_config({**LLAMA, "architectures": ["Gemma2ForCausalLM"], "sliding_window": 9})
    found = beyond(
        spec, frozenset({"norms", "norm_offset", "activation", "attn_scale", "tie_embeddings", "embed_scale"})
    )
    assert found == ["logit_cap = 30.0", "attn_cap = 50.0", "windows = (9, 0)"]


def test_parameters_follow_the_spec() -> None:
    names = {param.name for param in parameters(read_config(LLAMA))}
    assert {"embed", "layers.1.qkv", "layers.1.down", "norm", "head"} <= names
    tied = parameters(read_config({**LLAMA, "tie_word_embeddings": True}))
    assert "head" not in {param.name for param in tied}
    qwen2 = parameters(read_config({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}))
    assert [param.rows for param in qwen2 if param.name == "layers.0.qkv_bias"] == [64 + 32 + 32]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llama", "model_family is 'llama', which headway has a file of its own for"),
        ("collections", "model_family is 'collections', which has no ARCHITECTURES"),
        ("no_such_module", "cannot import 'no_such_module' for models"),
    ],
)
def test_a_family_from_outside_that_is_none_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config({"architectures": ["LlamaForCausalLM"]}, name)
