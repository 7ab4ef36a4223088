"""The decoder on a CUDA device: one step as a fixed sequence of kernel launches over static buffers.

It owns the activations and the order of the launches; what is computed is said in `decoder`. Nothing here waits for the
device or reads from it, so a step can be recorded as a graph and replayed. Kernels come from outside: this file imports
no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.cuda.ops import CudaKernels, DecodeWork, Heads, KVCells, Scaled
from headway.layers.rope import rope_table
from headway.models.params import ModelWeights
from headway.models.spec import ModelSpec

SCALE = ".scale"
"""Behind a matrix's name: its factors, one per row, float32."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """A step's inputs on the device, written by the kernels that prepare it."""

    packet: Tensor  # [words] int32
    tables: Tensor  # [rows, blocks] int32
    tokens: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_map: Tensor  # [T] int32: flat cell each new key goes to, -1 for padding
    sampled: Tensor  # [S] int32: tokens whose hidden state goes to the head
    decode: DecodeWork


@dataclass(frozen=True, slots=True)
class _CudaLayer:
    attn_norm: Tensor
    qkv: Scaled
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    o: Scaled
    mlp_norm: Tensor
    gate_up: Scaled
    down: Scaled


class CudaDecoder:
    """A token's logits depend on its own prefix alone, bit for bit, whatever else is in the step.

    A matrix of e4m3 has its input in e4m3 too; residual, attention and head keep the embedding's format.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights[Tensor],
        kernels: CudaKernels,
        *,
        block_size: int,
        max_len: int,
        max_tokens: int,
        max_samples: int,
    ) -> None:
        self.spec = spec
        self.heads = Heads(spec.heads, spec.kv_heads, spec.head_dim, block_size)
        self._ops = kernels
        embed = weights["embed"]
        device, dtype = embed.device, embed.dtype
        rope = rope_table(spec.head_dim, max_len, spec.rope_theta, spec.rope_scaling)
        self._rope = (torch.from_numpy(rope.cos).to(device), torch.from_numpy(rope.sin).to(device))
        self._layers = [_layer(weights, f"layers.{index}.") for index in range(spec.layers)]
        self._embed, self._norm = embed, weights["norm"]
        self._head = Scaled(embed if spec.tie_embeddings else weights["head"])
        kinds = {dtype} | {layer.qkv.values.dtype for layer in self._layers}

        def buffer(rows: int, width: int) -> Tensor:
            # Zeros: padding is computed too, and must be numbers.
            return torch.zeros((rows, width), dtype=dtype, device=device)

        def inputs(width: int) -> dict[torch.dtype, Scaled]:
            """By the format of the matrix that reads them."""
            ones = torch.ones(max_tokens, dtype=torch.float32, device=device)
            made = buffer(max_tokens, width)
            return {kind: Scaled(made.to(kind), None if kind == dtype else ones.clone()) for kind in kinds}

        self._residual, self._y = buffer(max_tokens, spec.hidden), buffer(max_tokens, spec.hidden)
        self._qkv = buffer(max_tokens, spec.q_size + 2 * spec.kv_size)
        self._gate_up = buffer(max_tokens, 2 * spec.intermediate)
        # Inputs of products: of qkv and of gate and up, of o, of down.
        self._normed, self._o_input, self._inner = inputs(spec.hidden), inputs(spec.q_size), inputs(spec.intermediate)
        self._mixed = self._o_input[dtype].values
        self._rows = buffer(max_samples, spec.hidden)
        self.logits = buffer(max_samples, spec.vocab_size)  # of the step that ran last

    def launch(
        self,
        step: StepBuffers,
        kv: Sequence[KVCells],
        num_tokens: int,
        num_samples: int,
        is_mixed: bool,
        *,
        is_trial: bool = False,
    ) -> Tensor:
        """Queue one step of so many tokens and samples, padding included; logits [num_samples, vocab].

        Without `is_mixed` every token decodes. A trial launches every kernel that there is, in a few layers.
        """
        ops, spec, eps = self._ops, self.spec, self.spec.norm_eps
        residual, gate_up = self._residual[:num_tokens], self._gate_up[:num_tokens]
        y = Scaled(self._y[:num_tokens])
        last = len(self._layers) - 1
        for index in sorted({0, last // 2, last}) if is_trial else range(last + 1):
            layer = self._layers[index]
            normed = _input(self._normed, layer.qkv, num_tokens)
            if index:
                ops.add_norm(y, residual, layer.attn_norm, normed, eps)
            else:
                ops.embed_norm(step.tokens, self._embed, layer.attn_norm, residual, normed, eps)
            y = self._attend(layer, index, step, kv[index], normed, is_mixed)
            normed, inner = (_input(x, layer.down, num_tokens) for x in (self._normed, self._inner))
            ops.add_norm(y, residual, layer.mlp_norm, normed, eps)
            ops.gate_up(normed, layer.gate_up, gate_up, inner)
            y = ops.linear(inner, layer.down, y.values)
        rows = self._rows[:num_samples]
        ops.gather_norm(y, residual, self._norm, step.sampled, rows, spec.norm_eps)
        return ops.linear(Scaled(rows), self._head, self.logits[:num_samples]).values

    def _attend(
        self, layer: _CudaLayer, index: int, step: StepBuffers, kv: KVCells, x: Scaled, is_mixed: bool
    ) -> Scaled:
        ops, heads, num = self._ops, self.heads, len(x.values)
        qkv, mixed, o_input = self._qkv[:num], self._mixed[:num], _input(self._o_input, layer.o, num)
        ops.qkv(
            *(
                x,
                layer.qkv,
                qkv,
                layer.qkv_bias,
                layer.head_norms,
                self._rope,
                step.positions,
                step.slot_map,
                kv,
                heads,
            ),
            self.spec.norm_eps,
        )
        ops.decode_attention(qkv, kv, step.tables, step.decode, index, mixed, heads)
        if is_mixed:
            ops.prefill_attention(qkv, kv, step.tables, step.packet, step.decode, mixed, heads)
        if o_input.rows is not None:
            ops.quantize(mixed, o_input)
        return ops.linear(o_input, layer.o, self._y[:num])


def _input(inputs: Mapping[torch.dtype, Scaled], w: Scaled, num: int) -> Scaled:
    x = inputs[w.values.dtype]
    return Scaled(x.values[:num], None if x.rows is None else x.rows[:num])


def _matrix(tensors: Mapping[str, Tensor], name: str) -> Scaled:
    return Scaled(tensors[name], tensors.get(name + SCALE))


def _layer(weights: ModelWeights[Tensor], prefix: str) -> _CudaLayer:
    tensors = weights.tensors
    norms = [tensors.get(prefix + name) for name in ("q_norm", "k_norm")]
    return _CudaLayer(
        attn_norm=tensors[prefix + "attn_norm"],
        qkv=_matrix(tensors, prefix + "qkv"),
        qkv_bias=tensors.get(prefix + "qkv_bias"),
        head_norms=None if norms[0] is None or norms[1] is None else (norms[0], norms[1]),
        o=_matrix(tensors, prefix + "o"),
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=_matrix(tensors, prefix + "gate_up"),
        down=_matrix(tensors, prefix + "down"),
    )
