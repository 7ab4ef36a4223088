"""`ModelSpec`: everything the decoder needs to know of a model, and the checked reading of a config.json into it.

A config is untrusted: every number is checked for type and range before anything is sized by it. Families differ in
data alone; this file knows none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import ModelFormatError

Config = Mapping[str, object]

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_LEN = 1 << 24


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled: `linear` divides all of them, `llama3` only the slow ones."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are in range, and heads divide evenly."""

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_len: int
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name, top in (
            ("vocab_size", MAX_VOCAB),
            ("hidden", MAX_WIDTH),
            ("intermediate", MAX_WIDTH),
            ("layers", MAX_LAYERS),
            ("heads", MAX_HEADS),
            ("kv_heads", MAX_HEADS),
            ("head_dim", 1024),
            ("max_len", MAX_LEN),
        ):
            _in_range(getattr(self, name), name, 1, top)
        if self.heads % self.kv_heads:
            raise ModelFormatError(f"{self.heads} heads do not divide into {self.kv_heads} key heads")
        if self.head_dim % 2:
            raise ModelFormatError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one token leaves behind in all layers."""
        return self.layers * 2 * self.kv_size * 4


def read_spec(
    config: Config, family: str, *, qkv_bias: bool = False, qk_norm: bool = False, window: int | None = None
) -> ModelSpec:
    """The reading all our families share. A `window` shorter than the context cuts the context to it."""
    _refuse_variants(config)
    hidden = read_int(config, "hidden_size")
    heads = read_int(config, "num_attention_heads", top=MAX_HEADS)
    if config.get("head_dim") is None and hidden % heads:
        raise ModelFormatError(f"hidden_size {hidden} does not divide into {heads} heads and head_dim is not given")
    max_len = read_int(config, "max_position_embeddings", top=MAX_LEN)
    theta, scaling = _read_rope(config)
    return ModelSpec(
        family=family,
        vocab_size=read_int(config, "vocab_size", top=MAX_VOCAB),
        hidden=hidden,
        intermediate=read_int(config, "intermediate_size"),
        layers=read_int(config, "num_hidden_layers", top=MAX_LAYERS),
        heads=heads,
        kv_heads=read_int(config, "num_key_value_heads", heads, top=MAX_HEADS),
        head_dim=read_int(config, "head_dim", hidden // heads, top=1024),
        norm_eps=read_real(config, "rms_norm_eps", 1e-6, top=1.0),
        rope_theta=theta,
        max_len=max_len if window is None else min(max_len, window),
        rope_scaling=scaling,
        tie_embeddings=read_bool(config, "tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def read_int(config: Config, key: str, default: int | None = None, *, top: int = MAX_WIDTH) -> int:
    """A whole number from 1 to `top`; the default where the key is missing or null."""
    value = config.get(key)
    if value is None:
        value = default
    return _in_range(value, key, 1, top)


def read_real(config: Config, key: str, default: float | None = None, *, top: float = 1e12) -> float:
    """A finite number above 0, up to `top`."""
    value = config.get(key)
    if value is None:
        value = default
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or not 0 < value <= top:  # type: ignore[arg-type, operator]
        raise ModelFormatError(f"the model's config has {key} = {_show(value)}; allowed: above 0, up to {top:g}")
    return float(value)  # type: ignore[arg-type]


def read_bool(config: Config, key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFormatError(f"the model's config has {key} = {_show(value)}; allowed: true or false")
    return value


def read_window(config: Config) -> int | None:
    """The sliding window, if there is one. Inside it plain attention gives the same result."""
    return None if config.get("sliding_window") is None else read_int(config, "sliding_window", top=MAX_LEN)


def _in_range(value: object, key: str, low: int, top: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= top:
        raise ModelFormatError(f"the model's config has {key} = {_show(value)}; allowed: {low} to {top}")
    return value


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]


def _refuse_variants(config: Config) -> None:
    """Refuse what would silently compute something else than the model means."""
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelFormatError(f"the model's config has hidden_act = {_show(act)}; allowed: silu")
    for key in ("attention_bias", "mlp_bias"):
        if read_bool(config, key, False):
            raise ModelFormatError(f"the model's config has {key} = true, which headway does not run")
    part = config.get("partial_rotary_factor")
    if part is not None and part != 1:
        raise ModelFormatError(f"the model's config has partial_rotary_factor = {_show(part)}; allowed: 1")


def _read_rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from the flat keys or from the newer `rope_parameters`."""
    data = config.get("rope_parameters")
    if data is None:
        data = config.get("rope_scaling")
    if data is None:
        return read_real(config, "rope_theta", 10000.0), None
    if not isinstance(data, Mapping):
        raise ModelFormatError(f"the model's config has rope_scaling = {_show(data)}; allowed: an object")
    theta = read_real(data, "rope_theta", read_real(config, "rope_theta", 10000.0))
    kind = data.get("rope_type", data.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", read_real(data, "factor"))
    if kind != "llama3":
        raise ModelFormatError(f"the model's config has rope type {_show(kind)}; allowed: default, linear, llama3")
    scaling = RopeScaling(
        kind="llama3",
        factor=read_real(data, "factor"),
        low_freq_factor=read_real(data, "low_freq_factor"),
        high_freq_factor=read_real(data, "high_freq_factor"),
        original_max_len=read_int(data, "original_max_position_embeddings", top=MAX_LEN),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        got = f"{scaling.high_freq_factor:g} and {scaling.low_freq_factor:g}"
        raise ModelFormatError(f"rope high_freq_factor and low_freq_factor are {got}; the first must be larger")
    return theta, scaling
