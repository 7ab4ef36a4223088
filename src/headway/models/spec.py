"""`ModelSpec`: everything the decoder needs to know of a model, and the checked reading of a config.json into it.

A config is untrusted: every number is checked for type and range before anything is sized by it. Families differ in
data alone; this file knows none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace

from headway.errors import ModelFormatError

Config = Mapping[str, object]

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_LEN = 1 << 24
MAX_EXPERTS = 1 << 12
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""What configs call the activation of the gate -> what we call it."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled: `linear` divides all of them, `llama3` only the slow ones, `divided` each by a
    number of its own."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    divisors: tuple[float, ...] = ()
    amplitude: float = 1.0  # multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are in range, and heads divide evenly.

    Every field behind `max_len` is a variant whose default is what Llama does; `beyond` names those a decoder lacks.
    """

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
    qk_norm_is_wide: bool = False  # over all query heads together, and all key heads, not over each
    norms: str = "before"  # attention and MLP; or "behind" them, or "around"
    norm_offset: float = 0.0  # added to the stored weights of norms
    activation: str = "silu"
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and MLP add
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # cap * tanh(logit / cap); 0: none
    attn_scale: float = 0.0  # multiplies scores; 0: head_dim ** -0.5
    attn_cap: float = 0.0  # of scores, as logit_cap
    rotary_dim: int = 0  # numbers of a head that rotate, its first; 0: all
    windows: tuple[int, ...] = ()  # tokens each layer sees, the query's own among them; 0: all of them; empty: all, all
    window_rope_theta: float = 0.0  # of layers with a window, unscaled; 0: as everywhere
    experts: int = 0  # of the MLP, `intermediate` wide each; 0: one, for all tokens
    experts_per_token: int = 0
    are_experts_normed: bool = True  # their shares add up to 1

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
        _in_range(self.experts, "experts", 0, MAX_EXPERTS)
        _in_range(self.experts_per_token, "experts_per_token", min(self.experts, 1), self.experts)
        _in_range(self.rotary_dim, "rotary_dim", 0, self.head_dim)
        assert not self.windows or len(self.windows) == self.layers, "a window for each layer, or none"
        if self.heads % self.kv_heads:
            raise ModelFormatError(f"{self.heads} heads do not divide into {self.kv_heads} key heads")
        if self.head_dim % 2 or self.rotary_dim % 2:
            got = f"head_dim is {self.head_dim}, of which {self.rope_size} rotate"
            raise ModelFormatError(f"{got}; rotary embeddings need even numbers")

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

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.attn_scale or float(self.head_dim**-0.5)

    @property
    def rope_size(self) -> int:
        return self.rotary_dim or self.head_dim

    def window(self, layer: int) -> int:
        """Tokens that the layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def cut_to_window(self) -> ModelSpec:
        """The same model without windows: the context is cut to the smallest, in which all attention is alike."""
        if not self.windows:
            return self
        smallest = min(filter(None, self.windows))
        theta = self.window_rope_theta
        if theta and not all(self.windows):
            return self  # its layers rotate differently inside the window too
        spec = replace(self, windows=(), window_rope_theta=0.0, max_len=min(self.max_len, smallest))
        return replace(spec, rope_theta=theta, rope_scaling=None) if theta else spec


def beyond(spec: ModelSpec, known: frozenset[str]) -> list[str]:
    """The variants of a spec that a decoder does not know which heeds the `known` fields alone."""
    return [
        f"{field.name} = {_show(getattr(spec, field.name))}"
        for field in fields(spec)
        if field.name not in known and field.default is not MISSING and getattr(spec, field.name) != field.default
    ]


def read_spec(
    config: Config,
    family: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    windows: Sequence[int] = (),
    may_rotate_part: bool = False,
) -> ModelSpec:
    """The reading all our families share. A window that is no shorter than the context is none."""
    activation, part = _read_activation(config), _read_part(config)
    hidden = read_int(config, "hidden_size")
    heads = read_int(config, "num_attention_heads", top=MAX_HEADS)
    if config.get("head_dim") is None and hidden % heads:
        raise ModelFormatError(f"hidden_size {hidden} does not divide into {heads} heads and head_dim is not given")
    if part != 1 and not may_rotate_part:
        raise ModelFormatError(f"the model's config has partial_rotary_factor = {part:g}; allowed: 1")
    head_dim = read_int(config, "head_dim", hidden // heads, top=1024)
    rotary_dim = int(head_dim * part)
    max_len = read_int(config, "max_position_embeddings", top=MAX_LEN)
    theta, scaling = read_rope(config, rotary_dim)
    if scaling is not None and scaling.kind == "divided":
        max_len = min(max_len, scaling.original_max_len)  # its divisors are those of short texts
    kept = tuple(window if window < max_len else 0 for window in windows)
    return ModelSpec(
        family=family,
        vocab_size=read_int(config, "vocab_size", top=MAX_VOCAB),
        hidden=hidden,
        intermediate=read_int(config, "intermediate_size"),
        layers=read_int(config, "num_hidden_layers", top=MAX_LAYERS),
        heads=heads,
        kv_heads=read_int(config, "num_key_value_heads", heads, top=MAX_HEADS),
        head_dim=head_dim,
        norm_eps=read_real(config, "rms_norm_eps", 1e-6, top=1.0),
        rope_theta=theta,
        max_len=max_len,
        rope_scaling=scaling,
        tie_embeddings=read_bool(config, "tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        activation=activation,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        windows=kept if any(kept) else (),
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


def read_window(config: Config) -> tuple[int, ...]:
    """The sliding window as that of every layer; empty where there is none."""
    if config.get("sliding_window") is None:
        return ()
    window = read_int(config, "sliding_window", top=MAX_LEN)
    return (window,) * read_int(config, "num_hidden_layers", top=MAX_LAYERS)


def read_late_windows(config: Config) -> tuple[int, ...]:
    """As Qwen means it: only if asked for, and in the layers from `max_window_layers` on."""
    if not read_bool(config, "use_sliding_window", False):
        return ()
    return read_pattern(
        config, full_first=_in_range(config.get("max_window_layers", 28), "max_window_layers", 0, MAX_LAYERS)
    )


def read_pattern(config: Config, *, full_each: int = 0, full_first: int = 0) -> tuple[int, ...]:
    """The sliding window of those layers that have it, 0 for the others, as `layer_types` says.

    Without it the last of `full_each` layers sees everything, or the first `full_first` do.
    """
    windows = read_window(config)
    kinds = config.get("layer_types")
    if not windows:
        return ()
    if kinds is None:
        each = read_int(config, "sliding_window_pattern", full_each, top=MAX_LAYERS) if full_each else len(windows) + 1
        return tuple(0 if at < full_first or (at + 1) % each == 0 else window for at, window in enumerate(windows))
    known = {"sliding_attention": windows[0], "full_attention": 0}
    if not isinstance(kinds, list | tuple) or len(kinds) != len(windows) or not {*map(str, kinds)} <= known.keys():
        allowed = f"{len(windows)} of {', '.join(known)}"
        raise ModelFormatError(f"the model's config has layer_types = {_show(kinds)}; allowed: {allowed}")
    return tuple(known[str(kind)] for kind in kinds)


def _in_range(value: object, key: str, low: int, top: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= top:
        raise ModelFormatError(f"the model's config has {key} = {_show(value)}; allowed: {low} to {top}")
    return value


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]


def _read_activation(config: Config) -> str:
    """Refuses with it what would silently compute something else than the model means."""
    for key in ("attention_bias", "mlp_bias"):
        if read_bool(config, key, False):
            raise ModelFormatError(f"the model's config has {key} = true, which headway does not run")
    name = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelFormatError(
            f"the model's config has hidden_act = {_show(name)}; allowed: {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _read_part(config: Config) -> float:
    """Which share of a head rotates."""
    rope = config.get("rope_parameters")
    inner = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return read_real({"partial_rotary_factor": inner, **config}, "partial_rotary_factor", 1.0, top=1.0)


def read_rope(config: Config, rotary_dim: int) -> tuple[float, RopeScaling | None]:
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
    if kind == "longrope":
        return theta, _read_divisors(config, data, rotary_dim)
    if kind != "llama3":
        allowed = "default, linear, llama3, longrope"
        raise ModelFormatError(f"the model's config has rope type {_show(kind)}; allowed: {allowed}")
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


def _read_divisors(config: Config, data: Config, rotary_dim: int) -> RopeScaling:
    """Longrope as it is inside the original context. Beyond it every position would rotate anew with each length."""
    name = "original_max_position_embeddings"
    original = read_int(
        {**config, **{key: value for key, value in data.items() if value is not None}}, name, top=MAX_LEN
    )
    found = data.get("short_factor")
    if not isinstance(found, list | tuple) or len(found) != rotary_dim // 2:
        count = len(found) if isinstance(found, list | tuple) else _show(found)
        raise ModelFormatError(f"rope short_factor has {count} numbers; allowed: {rotary_dim // 2}, half a head's")
    divisors = tuple(read_real({"short_factor": number}, "short_factor") for number in found)
    factor = read_int(config, "max_position_embeddings", top=MAX_LEN) / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    amplitude = read_real(data, "attention_factor", usual)
    return RopeScaling("divided", max(factor, 1.0), original_max_len=original, divisors=divisors, amplitude=amplitude)
