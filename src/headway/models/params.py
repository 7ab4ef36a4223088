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
    offset: float = 0.0  # added to what the checkpoint holds
    is_table: bool = False  # an embedding, a head or a choice of experts, which some layouts keep finer than the rest

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
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for kind, inner in (("attn", _attention_parameters), ("mlp", _mlp_parameters)):
            yield from _layer_norm(spec, ours, theirs, kind + "_norm")
            yield from inner(spec, ours, theirs)
            yield from _layer_norm(spec, ours, theirs, kind + "_out_norm")
    yield _norm(spec, "norm", "model.norm", spec.hidden)
    if not spec.tie_embeddings:
        yield Parameter("head", (Part("lm_head.weight", spec.vocab_size),), spec.hidden, is_table=True)


def is_ignored(source: str, spec: ModelSpec) -> bool:
    """Tensors of checkpoints that no parameter uses: a tied head's copy, rotary frequencies."""
    return (spec.tie_embeddings and source == "lm_head.weight") or source.endswith("rotary_emb.inv_freq")


NORMS = {
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "behind": {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""Where norms stand -> which a layer has, and what checkpoints call them."""


def _norm(spec: ModelSpec, ours: str, theirs: str, size: int) -> Parameter:
    return Parameter(ours, (Part(theirs + ".weight", size),), offset=spec.norm_offset)


def _layer_norm(spec: ModelSpec, ours: str, theirs: str, name: str) -> Iterator[Parameter]:
    """The norm of that name, where such a model has it."""
    source = NORMS[spec.norms].get(name)
    if source is not None:
        yield _norm(spec, ours + name, theirs + source, spec.hidden)


def _attention_parameters(spec: ModelSpec, ours: str, layer: str) -> Iterator[Parameter]:
    theirs = layer + "self_attn."
    qkv = (("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size))
    yield Parameter(ours + "qkv", tuple(Part(f"{theirs}{name}.weight", rows) for name, rows in qkv), spec.hidden)
    if spec.qkv_bias:
        yield Parameter(ours + "qkv_bias", tuple(Part(f"{theirs}{name}.bias", rows) for name, rows in qkv))
    if spec.qk_norm:
        sizes = (spec.q_size, spec.kv_size) if spec.qk_norm_is_wide else (spec.head_dim, spec.head_dim)
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            yield _norm(spec, ours + name, theirs + name, size)
    yield Parameter(ours + "o", (Part(theirs + "o_proj.weight", spec.hidden),), spec.q_size)


def _mlp_parameters(spec: ModelSpec, ours: str, layer: str) -> Iterator[Parameter]:
    theirs = layer + "mlp."
    if spec.experts:
        yield Parameter(ours + "router", (Part(theirs + "gate.weight", spec.experts),), spec.hidden, is_table=True)
    for number in range(spec.experts or 1):
        our, their = (f"{ours}experts.{number}.", f"{theirs}experts.{number}.") if spec.experts else (ours, theirs)
        gate_up = tuple(Part(f"{their}{name}.weight", spec.intermediate) for name in ("gate_proj", "up_proj"))
        yield Parameter(our + "gate_up", gate_up, spec.hidden)
        yield Parameter(our + "down", (Part(their + "down_proj.weight", spec.hidden),), spec.intermediate)
