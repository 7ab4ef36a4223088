"""The decoder on a CUDA device: one step as a fixed sequence of kernel launches over static buffers.

It owns the activations and the order of the launches; what is computed is said in `decoder`. Nothing here waits for the
device or reads from it, so a step can be recorded as a graph and replayed. Kernels come from outside: this file imports
no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.cuda.ops import CudaKernels, DecodeWork, Heads
from headway.layers.rope import rope_table
from headway.models.params import ModelWeights
from headway.models.spec import ModelSpec


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
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class CudaDecoder:
    """A token's logits depend on its own prefix alone, bit for bit, whatever else is in the step."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
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
        self._rope = (rope.cos.to(device), rope.sin.to(device))
        self._layers = [_layer(weights, f"layers.{index}.") for index in range(spec.layers)]
        self._embed, self._norm = embed, weights["norm"]
        self._head = embed if spec.tie_embeddings else weights["head"]

        def buffer(rows: int, width: int) -> Tensor:
            # Zeros: padding is computed too, and must be numbers.
            return torch.zeros((rows, width), dtype=dtype, device=device)

        self._residual, self._normed, self._y = (buffer(max_tokens, spec.hidden) for _ in range(3))
        self._qkv = buffer(max_tokens, spec.q_size + 2 * spec.kv_size)
        self._mixed = buffer(max_tokens, spec.q_size)
        self._gate_up, self._inner = buffer(max_tokens, 2 * spec.intermediate), buffer(max_tokens, spec.intermediate)
        self._rows = buffer(max_samples, spec.hidden)
        self.logits = buffer(max_samples, spec.vocab_size)  # of the step that ran last

    def launch(self, step: StepBuffers, kv: Tensor, num_tokens: int, num_samples: int, is_mixed: bool) -> Tensor:
        """Queue one step of so many tokens and samples, padding included; logits [num_samples, vocab].

        kv is [layers, 2, num_blocks, block_size, kv_heads, head_dim]. Without `is_mixed` every token decodes.
        """
        ops, spec = self._ops, self.spec
        residual, normed, y = self._residual[:num_tokens], self._normed[:num_tokens], self._y[:num_tokens]
        ops.embed_norm(step.tokens, self._embed, self._layers[0].attn_norm, residual, normed, spec.norm_eps)
        for index, layer in enumerate(self._layers):
            if index:
                ops.add_norm(y, residual, layer.attn_norm, normed, spec.norm_eps)
            self._attend(layer, index, step, kv[index], normed, y, is_mixed)
            ops.add_norm(y, residual, layer.mlp_norm, normed, spec.norm_eps)
            gate_up, inner = self._gate_up[:num_tokens], self._inner[:num_tokens]
            ops.gate_up(normed, layer.gate_up, gate_up, inner)
            ops.linear(inner, layer.down, y)
        rows, logits = self._rows[:num_samples], self.logits[:num_samples]
        ops.gather_norm(y, residual, self._norm, step.sampled, rows, spec.norm_eps)
        ops.linear(rows, self._head, logits)
        return logits

    def _attend(
        self, layer: _CudaLayer, index: int, step: StepBuffers, kv: Tensor, x: Tensor, out: Tensor, is_mixed: bool
    ) -> None:
        ops, heads = self._ops, self.heads
        qkv, mixed = self._qkv[: len(x)], self._mixed[: len(x)]
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
            ops.prefill_attention(qkv, kv, step.tables, step.packet, mixed, heads)
        ops.linear(mixed, layer.o, out)


def _layer(weights: ModelWeights, prefix: str) -> _CudaLayer:
    tensors = weights.tensors
    norms = [tensors.get(prefix + name) for name in ("q_norm", "k_norm")]
    return _CudaLayer(
        attn_norm=tensors[prefix + "attn_norm"],
        qkv=tensors[prefix + "qkv"],
        qkv_bias=tensors.get(prefix + "qkv_bias"),
        head_norms=None if norms[0] is None or norms[1] is None else (norms[0], norms[1]),
        o=tensors[prefix + "o"],
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=tensors[prefix + "gate_up"],
        down=tensors[prefix + "down"],
    )
