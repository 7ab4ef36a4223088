"""Configs become specs; hostile, broken and unsupported ones become one clear error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, ModelFormatError
from headway.models.registry import families, parameters, read_config
from headway.models.spec import RopeScaling

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
    names = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    assert names <= families().keys()


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", ["GPT2LMHeadModel"], [7], {"a": 1}])
def test_unknown_architecture_names_the_known_ones(named: object) -> None:
    with pytest.raises(ModelFormatError, match="LlamaForCausalLM, MistralForCausalLM"):
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


JUNK = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "rope_scaling", "rope_theta", "sliding_window"]), JUNK))
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


def test_sliding_window_cuts_the_context() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert read_config({**mistral, "sliding_window": 100}).max_len == 100
    assert read_config({**mistral, "sliding_window": 4096}).max_len == 256
    assert read_config({**mistral, "sliding_window": None}).max_len == 256
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen = {**LLAMA, "architectures": [name], "sliding_window": 100}
        assert read_config(qwen).max_len == 256
        assert read_config({**qwen, "use_sliding_window": True}).max_len == 100


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
