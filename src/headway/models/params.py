"""What a decoder's weights are called, which shape they have, and which named tensors of a checkpoint they come from.

Matrices that read the same input are one parameter (q, k, v; gate, up), so that a step multiplies once. This file
knows neither files nor the packed form: see `headway.runner.weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from headway.models.spec import ModelSpec


class Part(NamedTuple):
    """A tensor of the checkpoint and its number of rows in the parameter."""

    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """The parts, stacked in order, are [rows, columns], or [rows] where `columns` is 0."""

    name: str
    parts: tuple[Part, ...]
    columns: int = 0
    is_table: bool = False  # indexed by tokens: an embedding or a head, which some layouts keep finer than the rest

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def is_matrix(self) -> bool:
        """Matrices are packed for the kernels; vectors stay as they are."""
        return self.columns > 0

    def part_shape(self, part: Part) -> tuple[int, ...]:
        return (part.rows, self.columns) if self.is_matrix else (part.rows,)


class Sized(Protocol):
    """An array of the host or a tensor of a device."""

    @property
    def nbytes(self) -> int: ...


Kind = TypeVar("Kind", bound=Sized)


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[Kind]):
    """Every parameter of a spec by name, matrices packed in `layout`: arrays, or tensors of a device."""

    tensors: Mapping[str, Kind]
    layout: str

    def __getitem__(self, name: str) -> Kind:
        return self.tensors[name]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def decoder_parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """The names that Llama's checkpoints introduced and every family here uses."""
    yield Parameter("embed", (Part("model.embed_tokens.weight", spec.vocab_size),), spec.hidden, is_table=True)
    for layer in range(spec.layers):
        yield from _layer_parameters(spec, f"layers.{layer}.", f"model.layers.{layer}.")
    yield Parameter("norm", (Part("model.norm.weight", spec.hidden),))
    if not spec.tie_embeddings:
        yield Parameter("head", (Part("lm_head.weight", spec.vocab_size),), spec.hidden, is_table=True)


def is_ignored(source: str, spec: ModelSpec) -> bool:
    """Tensors of checkpoints that no parameter uses: a tied head's copy, rotary frequencies."""
    return (spec.tie_embeddings and source == "lm_head.weight") or source.endswith("rotary_emb.inv_freq")


def _layer_parameters(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Parameter]:
    attn, mlp = theirs + "self_attn.", theirs + "mlp."
    qkv = (("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size))
    yield Parameter(ours + "attn_norm", (Part(theirs + "input_layernorm.weight", spec.hidden),))
    yield Parameter(ours + "qkv", tuple(Part(f"{attn}{name}.weight", rows) for name, rows in qkv), spec.hidden)
    if spec.qkv_bias:
        yield Parameter(ours + "qkv_bias", tuple(Part(f"{attn}{name}.bias", rows) for name, rows in qkv))
    if spec.qk_norm:
        yield Parameter(ours + "q_norm", (Part(attn + "q_norm.weight", spec.head_dim),))
        yield Parameter(ours + "k_norm", (Part(attn + "k_norm.weight", spec.head_dim),))
    yield Parameter(ours + "o", (Part(attn + "o_proj.weight", spec.hidden),), spec.q_size)
    yield Parameter(ours + "mlp_norm", (Part(theirs + "post_attention_layernorm.weight", spec.hidden),))
    gate_up = tuple(Part(f"{mlp}{name}.weight", spec.intermediate) for name in ("gate_proj", "up_proj"))
    yield Parameter(ours + "gate_up", gate_up, spec.hidden)
    yield Parameter(ours + "down", (Part(mlp + "down_proj.weight", spec.hidden),), spec.intermediate)
