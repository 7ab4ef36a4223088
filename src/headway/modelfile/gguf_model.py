"""What a GGUF file's metadata and tensors mean, in the words of Hugging Face configs and checkpoints.

Owns the map from GGUF keys to config keys, from GGUF tensor names to checkpoint names with their shapes, and the
undoing of the row order llama's converter writes. Refuses to know how a model computes: `headway.models` does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headway.errors import ModelFormatError
from headway.modelfile.families import GgufNames, gguf_families
from headway.modelfile.gguf import GGUFFile
from headway.modelfile.gguf_kinds import KINDS, Kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headway.modelfile.groups import Groups

Config = dict[str, object]
_Item = TypeVar("_Item", bound="np.generic")

# Largest sizes we believe; beyond them the file is broken and its tables only cost memory.
_MAX_LAYERS, _MAX_WIDTH, _MAX_HEADS, _MAX_CONTEXT = 1024, 1 << 18, 4096, 1 << 28

_ROPE_FREQS = "rope_freqs.weight"
_ROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def hf_config(file: GGUFFile, family: str | None = None) -> Config:
    """The config.json this file would have had, checked for sense and against the shapes of its tensors.

    A `family` from outside may add architectures.
    """
    fields = _Fields(file, family)
    arch = fields.architecture
    if fields.integer("expert_count", 0, 0, 1 << 16):
        raise ModelFormatError(f"{file.path} is a mixture of experts; allowed: dense models")
    width = fields.integer("embedding_length", None, 1, _MAX_WIDTH)
    heads = fields.integer("attention.head_count", None, 1, _MAX_HEADS)
    kv_heads = fields.integer("attention.head_count_kv", heads, 1, heads)
    head_dim = fields.integer("attention.key_length", width // heads, 2, _MAX_WIDTH)
    fields.same("attention.value_length", head_dim)
    part = fields.integer("rope.dimension_count", head_dim, 2, head_dim)
    if not fields.kind.rotates_part:
        fields.same("rope.dimension_count", head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{file.path} has no token_embd.weight with two dimensions")
    config: Config = {
        "architectures": [fields.class_name],
        "model_type": arch,
        "hidden_size": width,
        "intermediate_size": fields.integer("feed_forward_length", None, 1, 1 << 20),
        "num_hidden_layers": fields.integer("block_count", None, 1, _MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "max_position_embeddings": fields.integer("context_length", None, 2, _MAX_CONTEXT),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    if arch != "qwen2":  # whose biases are not asked about: it has them
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config |= _own_config(fields, config)
    if part != head_dim:
        config["partial_rotary_factor"] = part / head_dim
    window = fields.integer("attention.sliding_window", 0, 0, _MAX_CONTEXT)
    config["sliding_window"] = window or None
    config["rope_scaling"] = _rope_scaling(fields, file, config)
    for name in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token_id"] = token if isinstance(token, int) else None
    _check_tensors(file, config, fields.kind, fields.own_names)
    return config


def _own_config(fields: _Fields, config: Config) -> Config:
    """What configs of this architecture say beside what all of them do."""
    kind = fields.kind
    own: Config = dict(kind.config)
    for key, name in kind.numbers.items():
        number = fields.real(key, 0.0, least=0.0)
        own[name] = number or None
    if kind.norm_offset:
        width, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        assert isinstance(width, int)
        assert isinstance(heads, int)
        own["query_pre_attn_scalar"] = width // heads if layers in kind.large_layers else config["head_dim"]
    return own


def iter_tensors(file: GGUFFile, family: str | None = None) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every tensor under its checkpoint name, float32, one at a time: only one is unpacked at once."""
    for place in _places(file, family):
        yield place.target, place.floats(file)


def iter_grouped(file: GGUFFile, family: str | None = None) -> Iterator[tuple[str, npt.NDArray[np.float32] | Groups]]:
    """As `iter_tensors`, but a matrix that the file keeps in groups comes as those."""
    from headway.modelfile.groups import Groups  # brings numpy: only when a tensor is touched

    for place in _places(file, family):
        groups = file.groups(place.source)
        if groups is None:
            yield place.target, place.floats(file)
        elif place.heads:
            heads = place.heads
            m = None if groups.m is None else unpermute(groups.m, heads)
            yield place.target, Groups(unpermute(groups.q, heads), unpermute(groups.d, heads), m)
        else:
            yield place.target, groups


class _Stored(NamedTuple):
    """A tensor of a checkpoint, and how it is read from the file."""

    target: str  # its name in the checkpoint
    source: str  # in the file
    heads: int  # whose rows are to be put in order, or 0
    offset: float  # to be taken off again

    def floats(self, file: GGUFFile) -> npt.NDArray[np.float32]:
        tensor = file.data(self.source)
        if self.offset:
            tensor = tensor - tensor.dtype.type(self.offset)
        return unpermute(tensor, self.heads) if self.heads else tensor


def _places(file: GGUFFile, family: str | None) -> Iterator[_Stored]:
    """Every tensor that a checkpoint would hold."""
    config, fields = hf_config(file, family), _Fields(file, family)
    kind = fields.kind
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    for source, target in tensor_names(file, config, kind, fields.own_names).items():
        permuted = heads if ".attn_q." in source else kv_heads if ".attn_k." in source else 0
        offset = kind.norm_offset if source.endswith("_norm.weight") else 0.0
        yield _Stored(target, source, permuted if kind.is_permuted else 0, offset)


def unpermute(tensor: npt.NDArray[_Item], heads: int) -> npt.NDArray[_Item]:
    """Rows of a query or key projection from the interleaved order of GGUF to the half-split one of checkpoints.

    in one head of 6:   GGUF  0 3 1 4 2 5   pairs to rotate are neighbours
                        HF    0 1 2 3 4 5   pairs to rotate are half a head apart
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, …]
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def tensor_names(
    file: GGUFFile, config: Config, kind: Kind, own: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """GGUF tensor name -> checkpoint name, for exactly the tensors of this file that a checkpoint holds."""
    shapes = _shapes(config, kind, own)
    return {source: target for source, (target, _) in shapes.items() if source in file.tensors}


def _shapes(config: Config, kind: Kind, own: Mapping[str, str]) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Every tensor such a model can have: GGUF name -> (checkpoint name, shape); of a family's own names none is known.

    Those are checked where the weights are put together.
    """
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    width, inner, vocab, head = size["hidden_size"], size["intermediate_size"], size["vocab_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * head, size["num_key_value_heads"] * head
    sizes = {"width": width, "inner": inner, "head": head, "queries": queries, "keys": keys}
    sizes |= {"fused": queries + 2 * keys, "gate and up": 2 * inner}
    shapes: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, width)),
        "output_norm.weight": ("model.norm.weight", (width,)),
        "output.weight": ("lm_head.weight", (vocab, width)),
    }
    for index in range(size["num_hidden_layers"]):
        for name, (target, dims) in {**kind.needed, **kind.optional}.items():
            shapes[f"blk.{index}.{name}"] = (f"model.layers.{index}.{target}", tuple(sizes[dim] for dim in dims))
        for name, target in own.items():
            shapes[f"blk.{index}.{name}"] = (f"model.layers.{index}.{target}", None)
    return shapes


def _check_tensors(file: GGUFFile, config: Config, kind: Kind, own: Mapping[str, str]) -> None:
    shapes = _shapes(config, kind, own)
    for name, (_, shape) in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            is_optional = name == "output.weight" or name.split(".", 2)[-1] in kind.optional
            if not own and not is_optional:
                raise ModelFormatError(f"{file.path} has no tensor {name!r}, which its architecture needs")
        elif shape is not None and info.shape != shape:
            raise ModelFormatError(f"{file.path}: tensor {name!r} has shape {info.shape}; its metadata say {shape}")
    for name in file.tensors:
        if name not in shapes and name != _ROPE_FREQS and name not in _ROPE_FACTORS.values():
            raise ModelFormatError(f"{file.path} holds tensor {name!r}, which headway would not compute with")


def _rope_scaling(fields: _Fields, file: GGUFFile, config: Config) -> Config | None:
    kind = file.metadata.get(f"{fields.architecture}.rope.scaling.type", "none")
    if _ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, config)
    if _ROPE_FACTORS["short_factor"] in file.tensors:
        return _longrope_scaling(fields, file, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelFormatError(f"{file.path} scales positions by {kind!r}; allowed: none, linear, yarn")
    scaling: Config = {"rope_type": kind, "factor": fields.real("rope.scaling.factor", 1.0)}
    original = fields.integer("rope.scaling.original_context_length", 0, 0, _MAX_CONTEXT)
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _longrope_scaling(fields: _Fields, file: GGUFFile, config: Config) -> Config:
    scaling: Config = {"rope_type": "longrope"}
    for key, name in _ROPE_FACTORS.items():
        scaling[key] = [float(x) for x in file.data(name).reshape(-1)] if name in file.tensors else None
    context = config["max_position_embeddings"]
    assert isinstance(context, int)
    original = fields.integer("rope.scaling.original_context_length", context, 2, _MAX_CONTEXT)
    factor = fields.real("rope.scaling.attn_factor", 0.0, least=0.0)
    return scaling | {"original_max_position_embeddings": original, "attention_factor": factor or None}


def _llama3_scaling(file: GGUFFile, config: Config) -> Config:
    """Llama 3.1's converter stores the divisors of the frequencies instead of the rule behind them: find the rule."""
    stored = [float(x) for x in file.data(_ROPE_FREQS).reshape(-1)]
    head_dim, theta = config["head_dim"], config["rope_theta"]
    assert isinstance(head_dim, int)
    assert isinstance(theta, float)
    rule: Config = {
        "rope_type": "llama3",
        "factor": max(stored),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wanted = []
    for index in range(head_dim // 2):
        turns = 8192 / (2 * math.pi * theta ** (2 * index / head_dim))  # in the original context
        smooth = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        wanted.append(1.0 / ((1.0 - smooth) / max(stored) + smooth) if max(stored) > 0 else 0.0)
    pairs = zip(stored, wanted, strict=False)
    if len(stored) != len(wanted) or not all(math.isclose(got, want, rel_tol=1e-3) for got, want in pairs):
        raise ModelFormatError(f"{file.path} scales its rotary frequencies in a way headway does not know")
    return rule


class _Fields:
    """The metadata under the architecture's name, each value checked for type and range when asked for."""

    def __init__(self, file: GGUFFile, family: str | None) -> None:
        self._file = file
        name = file.metadata.get("general.architecture")
        known = {arch: GgufNames(kind.class_name, {}) for arch, kind in KINDS.items()}
        if name not in known or family is not None:
            known |= gguf_families(family)
        if not isinstance(name, str) or name not in known:
            raise ModelFormatError(
                f"{file.path} has the architecture {name!r}; allowed: {', '.join(known)}. "
                "Choose a model of one of these families"
            )
        self.architecture = name
        self.class_name, self.own_names = known[name]
        self.kind = Kind(self.class_name) if self.own_names or name not in KINDS else KINDS[name]

    def integer(self, key: str, default: int | None, least: int, most: int) -> int:
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self._refuse(key, value, f"an integer from {least} to {most}")
        assert isinstance(value, int)
        return value

    def real(self, key: str, default: float, *, least: float | None = None) -> float:
        """A finite number above 0, or from `least` on."""
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < (least or 0.0):
            self._refuse(key, value, "a number above 0" if least is None else f"a number from {least:g}")
        assert isinstance(value, int | float)
        if least is None and value == 0:
            self._refuse(key, value, "a number above 0")
        return _shortest(float(value))

    def same(self, key: str, wanted: int) -> None:
        value = self._file.metadata.get(f"{self.architecture}.{key}", wanted)
        if value != wanted:
            self._refuse(key, value, f"{wanted}, the size of a head")

    def _refuse(self, key: str, value: object, allowed: str) -> None:
        raise ModelFormatError(f"{self._file.path}: {self.architecture}.{key} is {value!r}; allowed: {allowed}")


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: the file keeps 1e-05 as 9.999999747378752e-06."""
    try:
        exact = struct.pack("<f", value)
    except OverflowError:
        return value
    for digits in range(1, 9):
        rounded = float(f"{value:.{digits}g}")
        if struct.pack("<f", rounded) == exact:
            return rounded
    return value
