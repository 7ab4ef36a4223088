"""The one transformer: every family here is this decoder over another `ModelSpec`.

It keeps no state between calls; keys and values live in the `kv` the caller owns. It does not know
which rows are requests or chunks, nor how the logits are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.kernels.checks import Array
from headway.kernels.ops import KernelSet
from headway.layers.rope import rope_table
from headway.models.batch import ForwardBatch
from headway.models.params import ModelWeights
from headway.models.pick import best_tokens
from headway.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, matrices packed."""

    attn_norm: Array
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    mlp_norm: Array
    gate_up: Array
    down: Array


class Decoder:
    """A token's logits depend on its own prefix alone, bit for bit, whatever else is in the batch."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights[Array], kernels: KernelSet) -> None:
        assert weights.layout == kernels.layout, f"weights are {weights.layout}, kernels take {kernels.layout}"
        self.spec = spec
        self._ops = kernels
        self._rope = rope_table(spec.head_dim, spec.max_len, spec.rope_theta, spec.rope_scaling)
        self._layers = [_layer(weights, f"layers.{index}.") for index in range(spec.layers)]
        self._embed = weights["embed"]
        self._norm = weights["norm"]
        self._head = weights["embed"] if spec.tie_embeddings else weights["head"]
        self._scale = float(spec.head_dim**-0.5)

    def forward(self, batch: ForwardBatch, kv: Array) -> NDArray[np.float32]:
        """Write the batch's keys and values into `kv` and return logits [S, vocab] float32 of `sample_index`.

        kv is [layers, 2, num_blocks, block_size, kv_heads, head_dim] float32.
        """
        ops, spec = self._ops, self.spec
        x = ops.embed(self._embed, batch.tokens)  # [T, hidden]
        for index, layer in enumerate(self._layers):
            x += self._attend(layer, ops.rms_norm(x, layer.attn_norm, spec.norm_eps), batch, kv[index])
            inner = ops.linear(
                ops.rms_norm(x, layer.mlp_norm, spec.norm_eps), layer.gate_up, None, 2 * spec.intermediate
            )
            x += ops.linear(ops.silu_mul(inner), layer.down, None, spec.hidden)
        rows = ops.rms_norm(x[batch.sample_index], self._norm, spec.norm_eps)
        logits: NDArray[np.float32] = ops.linear(rows, self._head, None, spec.vocab_size)
        return logits

    def pick(self, batch: ForwardBatch, kv: Array) -> NDArray[np.int64]:
        """Like `forward`, of which only the greedy choice is kept: [S] as in `best_tokens`."""
        return best_tokens(self.forward(batch, kv))

    def _attend(self, layer: _Layer, x: Array, batch: ForwardBatch, kv_layer: Array) -> Array:
        ops, spec = self._ops, self.spec
        fused = ops.linear(x, layer.qkv, layer.qkv_bias, spec.q_size + 2 * spec.kv_size)
        heads = fused.reshape(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        keys_end = spec.heads + spec.kv_heads
        q, k, v = heads[:, : spec.heads], heads[:, spec.heads : keys_end], heads[:, keys_end:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        ops.rope(q, k, batch.positions, self._rope.cos, self._rope.sin)
        ops.write_kv(k, v, kv_layer, batch.slot_map)
        mixed = ops.attention(q, kv_layer, batch, self._scale)
        return ops.linear(mixed.reshape(-1, spec.q_size), layer.o, None, spec.hidden)


def _layer(weights: ModelWeights[Array], prefix: str) -> _Layer:
    tensors = weights.tensors
    return _Layer(
        attn_norm=tensors[prefix + "attn_norm"],
        qkv=tensors[prefix + "qkv"],
        qkv_bias=tensors.get(prefix + "qkv_bias"),
        q_norm=tensors.get(prefix + "q_norm"),
        k_norm=tensors.get(prefix + "k_norm"),
        o=tensors[prefix + "o"],
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=tensors[prefix + "gate_up"],
        down=tensors[prefix + "down"],
    )
