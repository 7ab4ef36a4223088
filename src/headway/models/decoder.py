"""The one transformer: every family here is this decoder over another `ModelSpec`.

It keeps no state between calls; keys and values live in the `kv` the caller owns. It does not know
which rows are requests or chunks, nor how the logits are used. It may be one part of several that compute a model
together: `shard` says which.
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
from headway.models.pick import Allowed, best_tokens
from headway.models.shard import WHOLE, Gather, Shard, ShardSizes, keep_whole
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

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights[Array],
        kernels: KernelSet,
        shard: Shard = WHOLE,
        gather: Gather = keep_whole,
    ) -> None:
        assert weights.layout == kernels.layout, f"weights are {weights.layout}, kernels take {kernels.layout}"
        self.spec = spec
        self.shard = shard
        self._ops = kernels
        self._sizes = ShardSizes(spec, shard)
        self._gather = gather
        self._rope = rope_table(spec.head_dim, spec.max_len, spec.rope_theta, spec.rope_scaling)
        self._layers = [_layer(weights, f"layers.{index}.") for index in range(spec.layers)]
        self._embed = weights["embed"]
        self._norm = weights["norm"]
        self._head = weights["embed"] if spec.tie_embeddings and shard.size == 1 else weights["head"]
        self._scale = float(spec.head_dim**-0.5)

    def forward(self, batch: ForwardBatch, kv: Array) -> NDArray[np.float32]:
        """Write the batch's keys and values into `kv` and return logits [S, vocab] float32 of `sample_index`.

        kv is [layers, 2, num_blocks, block_size, kv_heads, head_dim] float32; kv_heads are this part's.
        """
        ops, spec, sizes = self._ops, self.spec, self._sizes
        x = ops.embed(self._embed, batch.tokens)  # [T, hidden]
        for index, layer in enumerate(self._layers):
            x += self._attend(layer, ops.rms_norm(x, layer.attn_norm, spec.norm_eps), batch, kv[index])
            normed = ops.rms_norm(x, layer.mlp_norm, spec.norm_eps)
            inner = ops.silu_mul(ops.linear(normed, layer.gate_up, None, 2 * sizes.inner))
            down = ops.linear(self._gather(inner, sizes.inner_widths), layer.down, None, sizes.hidden)
            x += self._gather(down, sizes.hidden_widths)
        rows = ops.rms_norm(x[batch.sample_index], self._norm, spec.norm_eps)
        logits: NDArray[np.float32] = self._gather(ops.linear(rows, self._head, None, sizes.vocab), sizes.vocab_widths)
        return logits

    def pick(self, batch: ForwardBatch, kv: Array, allowed: Allowed | None = None) -> NDArray[np.int64]:
        """Like `forward`, of which only the greedy choice is kept: [S] as in `best_tokens`."""
        return best_tokens(self.forward(batch, kv), allowed)

    def _attend(self, layer: _Layer, x: Array, batch: ForwardBatch, kv_layer: Array) -> Array:
        ops, spec, sizes = self._ops, self.spec, self._sizes
        num_heads, keys_end = sizes.heads, sizes.heads + sizes.kv_heads
        num_fused = keys_end + sizes.kv_heads
        fused = ops.linear(x, layer.qkv, layer.qkv_bias, num_fused * spec.head_dim)
        heads = fused.reshape(-1, num_fused, spec.head_dim)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:keys_end], heads[:, keys_end:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        ops.rope(q, k, batch.positions, self._rope.cos, self._rope.sin)
        ops.write_kv(k, v, kv_layer, batch.slot_map)
        mixed = ops.attention(q, kv_layer, batch, self._scale)
        mixed = self._gather(mixed.reshape(-1, num_heads * spec.head_dim), sizes.mixed_widths)
        return self._gather(ops.linear(mixed, layer.o, None, sizes.hidden), sizes.hidden_widths)


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
