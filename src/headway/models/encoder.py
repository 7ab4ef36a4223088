"""BERT and what is built like it: a transformer in which every token sees the whole text, before and behind it.

It owns the names of the weights and the computation. It keeps nothing between calls: keys and values lie in a scratch
layer that every layer of the model writes anew. Pooling stays outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, ModelFormatError
from headway.kernels.checks import Array
from headway.kernels.ops import KernelSet
from headway.models.encoder_spec import EncoderSpec

_BLOCK = 16  # cells of a block of the scratch layer
_PREFIXES = ("bert.", "roberta.")
_UNUSED = ("pooler.", "lm_head.", "cls.")


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Array
    bias: Array


@dataclass(frozen=True, slots=True)
class _Linear:
    w: Array  # packed
    bias: Array
    out: int


@dataclass(frozen=True, slots=True)
class _EncoderLayer:
    qkv: _Linear
    o: _Linear
    attn_norm: _Norm
    up: _Linear
    down: _Linear
    mlp_norm: _Norm


@dataclass(frozen=True, slots=True)
class TextRows:
    """Whole texts side by side, as attention sees them. Every query stands at its text's end, so it sees all of it."""

    positions: NDArray[np.int64]  # [T]
    row_of: NDArray[np.int32]  # [T]
    tables: NDArray[np.int32]  # [R, W]
    query_start: NDArray[np.int32]  # [R + 1]
    context: NDArray[np.int32]  # [R]
    places: NDArray[np.int64]  # [T]: of each token in its text
    slot_map: NDArray[np.int64]  # [T]: where its key goes
    num_blocks: int
    block_size: int = field(default=_BLOCK)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TextRows:
        counts = np.array(lengths, np.int64)
        blocks = -(-counts // _BLOCK)
        first = np.cumsum(blocks) - blocks
        starts = np.concatenate(([0], np.cumsum(counts)))
        row_of = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(starts[-1]) - starts[row_of]
        tables = np.zeros((len(counts), int(blocks.max())), np.int32)
        for row, (at, count) in enumerate(zip(first, blocks, strict=True)):
            tables[row, :count] = np.arange(at, at + count)
        return cls(
            positions=(counts - 1)[row_of],
            row_of=row_of.astype(np.int32),
            tables=tables,
            query_start=starts.astype(np.int32),
            context=counts.astype(np.int32),
            places=places,
            slot_map=first[row_of] * _BLOCK + places,
            num_blocks=int(blocks.sum()),
        )


class Encoder:
    """A token's vector depends on its own text alone, bit for bit, whatever other texts are computed with it."""

    def __init__(self, spec: EncoderSpec, tensors: Iterable[tuple[str, NDArray[np.float32]]], kernels: KernelSet):
        if kernels.layer_norm is None or kernels.gelu is None:
            raise ConfigError(f"the kernels {kernels.name} have no layer_norm and gelu, which encoders need")
        self.spec = spec
        self._ops, self._layer_norm, self._gelu = kernels, kernels.layer_norm, kernels.gelu
        found = _Tensors(tensors)
        hidden, inner = spec.hidden, spec.intermediate
        table = kernels.pack if kernels.pack_table is None else kernels.pack_table
        self._words = table(found.take("embeddings.word_embeddings.weight", spec.vocab_size, hidden))
        num_positions = spec.first_position + spec.max_len
        positions = found.take("embeddings.position_embeddings.weight", num_positions, hidden)
        kinds = found.take("embeddings.token_type_embeddings.weight", None, hidden)
        self._places = positions[spec.first_position :] + kinds[0]  # every text is of the first kind
        self._norm = found.norm("embeddings.LayerNorm", hidden)
        self._layers = []
        for index in range(spec.layers):
            name = f"encoder.layer.{index}."
            parts = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]
            self._layers.append(
                _EncoderLayer(
                    qkv=found.linear(parts, hidden, hidden, kernels),
                    o=found.linear([name + "attention.output.dense"], hidden, hidden, kernels),
                    attn_norm=found.norm(name + "attention.output.LayerNorm", hidden),
                    up=found.linear([name + "intermediate.dense"], inner, hidden, kernels),
                    down=found.linear([name + "output.dense"], hidden, inner, kernels),
                    mlp_norm=found.norm(name + "output.LayerNorm", hidden),
                )
            )
        found.require_all_taken()

    def hidden(self, tokens: NDArray[np.int64], rows: TextRows) -> Array:
        """The last layer's vectors [T, hidden] of texts side by side."""
        spec = self.spec
        x = self._ops.embed(self._words, tokens) + self._places[rows.places]
        x = self._normed(x, self._norm)
        kv = np.empty((2, rows.num_blocks, _BLOCK, spec.heads, spec.head_dim), np.float32)
        for layer in self._layers:
            x = self._normed(x + self._attend(layer, x, rows, kv), layer.attn_norm)
            active = self._gelu(self._linear(x, layer.up))
            x = self._normed(x + self._linear(active, layer.down), layer.mlp_norm)
        return x

    def _attend(self, layer: _EncoderLayer, x: Array, rows: TextRows, kv: Array) -> Array:
        spec, ops = self.spec, self._ops
        fused = self._linear(x, layer.qkv).reshape(-1, 3, spec.heads, spec.head_dim)
        ops.write_kv(fused[:, 1], fused[:, 2], kv, rows.slot_map)
        mixed = ops.attention(fused[:, 0], kv, rows, float(spec.head_dim**-0.5))
        return self._linear(mixed.reshape(-1, spec.hidden), layer.o)

    def _linear(self, x: Array, layer: _Linear) -> Array:
        return self._ops.linear(x, layer.w, layer.bias, layer.out)

    def _normed(self, x: Array, norm: _Norm) -> Array:
        return self._layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)


class _Tensors:
    """A checkpoint's tensors by name, each taken once."""

    def __init__(self, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
        self._tensors: dict[str, NDArray[np.float32]] = {}
        for name, tensor in tensors:
            bare = next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name)
            if not bare.startswith(_UNUSED):
                self._tensors[bare] = tensor

    def take(self, name: str, *shape: int | None) -> NDArray[np.float32]:
        """The tensor of that name and shape; None is any size of at least 1."""
        tensor = self._tensors.pop(name, None)
        wanted = list(shape)
        if tensor is None:
            raise ModelFormatError(f"the weights lack {name!r} {wanted}")
        fits = tensor.ndim == len(shape) and all(
            size == want if want is not None else size >= 1 for size, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            raise ModelFormatError(f"{name!r} is {list(tensor.shape)}; the config says {wanted}")
        return np.array(tensor)  # what the file holds cannot be written to, and torch warns of that

    def norm(self, name: str, size: int) -> _Norm:
        return _Norm(self.take(f"{name}.weight", size), self.take(f"{name}.bias", size))

    def linear(self, names: Sequence[str], rows: int, columns: int, kernels: KernelSet) -> _Linear:
        """Matrices that read the same input, stacked, with their biases."""
        w = np.concatenate([self.take(f"{name}.weight", rows, columns) for name in names])
        bias = np.concatenate([self.take(f"{name}.bias", rows) for name in names])
        return _Linear(kernels.pack(w), bias, len(w))

    def require_all_taken(self) -> None:
        if self._tensors:
            raise ModelFormatError(f"the weights hold {sorted(self._tensors)[0]!r}, which the config says nothing of")
