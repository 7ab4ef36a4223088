"""What a GGUF file's metadata and tensors mean, in the words of Hugging Face configs and checkpoints.

Owns the map from GGUF keys to config keys, from GGUF tensor names to checkpoint names with their shapes, and the
undoing of the row order llama's converter writes. Refuses to know how a model computes: `headway.models` does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from headway.errors import ModelFormatError
from headway.modelfile.families import GgufNames, gguf_families
from headway.modelfile.gguf import GGUFFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headway.modelfile.groups import Groups

Config = dict[str, object]
_Item = TypeVar("_Item", bound="np.generic")

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)

# Largest sizes we believe; beyond them the file is broken and its tables only cost memory.
_MAX_LAYERS, _MAX_WIDTH, _MAX_HEADS, _MAX_CONTEXT = 1024, 1 << 18, 4096, 1 << 28

_PER_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_q.bias": "self_attn.q_proj.bias",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_k.bias": "self_attn.k_proj.bias",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_v.bias": "self_attn.v_proj.bias",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_output.bias": "self_attn.o_proj.bias",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    }
)
_ROPE_FREQS = "rope_freqs.weight"


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
    if arch in ("llama", "mistral"):
        config["mlp_bias"] = False
    window = fields.integer("attention.sliding_window", 0, 0, _MAX_CONTEXT)
    config["sliding_window"] = window or None
    config["rope_scaling"] = _rope_scaling(fields, file, config)
    for name in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token_id"] = token if isinstance(token, int) else None
    _check_tensors(file, config, fields.own_names)
    return config


def iter_tensors(file: GGUFFile, family: str | None = None) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every tensor under its checkpoint name, float32, one at a time: only one is unpacked at once."""
    for target, source, heads in _places(file, family):
        tensor = file.data(source)
        yield target, unpermute(tensor, heads) if heads else tensor


def iter_grouped(file: GGUFFile, family: str | None = None) -> Iterator[tuple[str, npt.NDArray[np.float32] | Groups]]:
    """As `iter_tensors`, but a matrix that the file keeps in 4-bit groups comes as those."""
    from headway.modelfile.groups import Groups  # brings numpy: only when a tensor is touched

    for target, source, heads in _places(file, family):
        groups = file.groups(source)
        if groups is None:
            tensor = file.data(source)
            yield target, unpermute(tensor, heads) if heads else tensor
        elif heads:
            yield target, Groups(unpermute(groups.q, heads), unpermute(groups.d, heads), unpermute(groups.m, heads))
        else:
            yield target, groups


def _places(file: GGUFFile, family: str | None) -> Iterator[tuple[str, str, int]]:
    """(checkpoint name, name in the file, heads whose rows are to be put in order or 0) of every tensor."""
    config, fields = hf_config(file, family), _Fields(file, family)
    is_permuted = fields.architecture == "llama"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    for source, target in tensor_names(file, config, fields.own_names).items():
        permuted = heads if ".attn_q." in source else kv_heads if ".attn_k." in source else 0
        yield target, source, permuted if is_permuted else 0


def unpermute(tensor: npt.NDArray[_Item], heads: int) -> npt.NDArray[_Item]:
    """Rows of a query or key projection from the interleaved order of GGUF to the half-split one of checkpoints.

    in one head of 6:   GGUF  0 3 1 4 2 5   pairs to rotate are neighbours
                        HF    0 1 2 3 4 5   pairs to rotate are half a head apart
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, …]
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def tensor_names(file: GGUFFile, config: Config, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """GGUF tensor name -> checkpoint name, for exactly the tensors of this file that a checkpoint holds."""
    shapes = _shapes(config, own)
    return {source: target for source, (target, _) in shapes.items() if source in file.tensors}


def _shapes(config: Config, own: Mapping[str, str]) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Every tensor such a model can have: GGUF name -> (checkpoint name, shape); of a family's own names none is known.

    Those are checked where the weights are put together.
    """
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    width, inner, vocab = size["hidden_size"], size["intermediate_size"], size["vocab_size"]
    head_dim = size["head_dim"]
    queries, keys = size["num_attention_heads"] * head_dim, size["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (queries, width),
        "attn_q.bias": (queries,),
        "attn_k.weight": (keys, width),
        "attn_k.bias": (keys,),
        "attn_v.weight": (keys, width),
        "attn_v.bias": (keys,),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (width, queries),
        "attn_output.bias": (width,),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (inner, width),
        "ffn_up.weight": (inner, width),
        "ffn_down.weight": (width, inner),
    }
    shapes: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, width)),
        "output_norm.weight": ("model.norm.weight", (width,)),
        "output.weight": ("lm_head.weight", (vocab, width)),
    }
    for index in range(size["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"blk.{index}.{name}"] = (f"model.layers.{index}.{_PER_LAYER[name]}", shape)
        for name, target in own.items():
            shapes[f"blk.{index}.{name}"] = (f"model.layers.{index}.{target}", None)
    return shapes


def _is_optional(name: str, config: Config) -> bool:
    if name == "output.weight":
        return True
    if name.endswith("_norm.weight") and ("attn_q_norm" in name or "attn_k_norm" in name):
        return config["model_type"] != "qwen3"
    if name.endswith("attn_output.bias"):
        return True
    return name.endswith(".bias") and config["model_type"] != "qwen2"


def _check_tensors(file: GGUFFile, config: Config, own: Mapping[str, str]) -> None:
    shapes = _shapes(config, own)
    for name, (_, shape) in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            if not own and not _is_optional(name, config):
                raise ModelFormatError(f"{file.path} has no tensor {name!r}, which its architecture needs")
        elif shape is not None and info.shape != shape:
            raise ModelFormatError(f"{file.path}: tensor {name!r} has shape {info.shape}; its metadata say {shape}")
    for name in file.tensors:
        if name not in shapes and name != _ROPE_FREQS:
            raise ModelFormatError(f"{file.path} holds tensor {name!r}, which headway would not compute with")


def _rope_scaling(fields: _Fields, file: GGUFFile, config: Config) -> Config | None:
    kind = file.metadata.get(f"{fields.architecture}.rope.scaling.type", "none")
    if _ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelFormatError(f"{file.path} scales positions by {kind!r}; allowed: none, linear, yarn")
    scaling: Config = {"rope_type": kind, "factor": fields.real("rope.scaling.factor", 1.0)}
    original = fields.integer("rope.scaling.original_context_length", 0, 0, _MAX_CONTEXT)
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


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
        known = {arch: GgufNames(class_name, {}) for arch, class_name in ARCHITECTURES.items()}
        if name not in known:
            known |= gguf_families(family)
        if not isinstance(name, str) or name not in known:
            raise ModelFormatError(
                f"{file.path} has the architecture {name!r}; allowed: {', '.join(known)}. "
                "Choose a model of one of these families"
            )
        self.architecture = name
        self.class_name, self.own_names = known[name]

    def integer(self, key: str, default: int | None, least: int, most: int) -> int:
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self._refuse(key, value, f"an integer from {least} to {most}")
        assert isinstance(value, int)
        return value

    def real(self, key: str, default: float) -> float:
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self._refuse(key, value, "a number above 0")
        assert isinstance(value, int | float)
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
