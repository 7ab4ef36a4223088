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
from headway.layers.rope import RopeTable
from headway.models.batch import ForwardBatch
from headway.models.experts import Experts, Mlp, read_experts, read_mlp
from headway.models.params import ModelWeights
from headway.models.pick import Allowed, best_tokens
from headway.models.rotary import rope_tables
from headway.models.shard import WHOLE, Gather, Shard, ShardSizes, keep_whole
from headway.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, matrices packed."""

    attn_norm: Array | None
    attn_out_norm: Array | None
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    mlp_norm: Array | None
    mlp_out_norm: Array | None
    mlp: Mlp | None
    experts: Experts | None
    window: int
    rope: RopeTable


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
        ropes = rope_tables(spec)
        self._layers = [
            _layer(weights, f"layers.{index}.", spec.window(index), ropes[spec.window(index) > 0])
            for index in range(spec.layers)
        ]
        self._embed = weights["embed"]
        self._norm = weights["norm"]
        self._head = weights["embed"] if spec.tie_embeddings and shard.size == 1 else weights["head"]
        self._gate = kernels.silu_mul if spec.activation == "silu" else kernels.gelu_mul

    def forward(self, batch: ForwardBatch, kv: Array) -> NDArray[np.float32]:
        """Write the batch's keys and values into `kv` and return logits [S, vocab] float32 of `sample_index`.

        kv is [layers, 2, num_blocks, block_size, kv_heads, head_dim] float32; kv_heads are this part's.
        """
        return self._logits(self.hidden(batch, kv))

    def hidden(self, batch: ForwardBatch, kv: Array) -> Array:
        """As `forward`, but the vectors [S, hidden] that logits are made of."""
        ops, spec = self._ops, self.spec
        x = ops.embed(self._embed, batch.tokens)  # [T, hidden]
        if spec.embed_scale != 1.0:
            x *= np.float32(spec.embed_scale)
        for index, layer in enumerate(self._layers):
            self._add(x, self._attend(index, self._normed(x, layer.attn_norm), batch, kv[index]), layer.attn_out_norm)
            self._add(x, self._mix(index, self._normed(x, layer.mlp_norm), batch), layer.mlp_out_norm)
        return ops.rms_norm(x[batch.sample_index], self._norm, spec.norm_eps)

    def pick(self, batch: ForwardBatch, kv: Array, allowed: Allowed | None = None) -> NDArray[np.int64]:
        """Like `forward`, of which only the greedy choice is kept: [S] as in `best_tokens`."""
        return best_tokens(self.forward(batch, kv), allowed)

    def _normed(self, x: Array, weight: Array | None) -> Array:
        return x if weight is None else self._ops.rms_norm(x, weight, self.spec.norm_eps)

    def _add(self, x: Array, y: Array, weight: Array | None) -> None:
        """x += y, normed and scaled as the model does it."""
        y = self._normed(y, weight)
        if self.spec.residual_scale != 1.0:
            y = y * np.float32(self.spec.residual_scale)
        x += y

    def _logits(self, rows: Array) -> NDArray[np.float32]:
        ops, spec, sizes = self._ops, self.spec, self._sizes
        logits: NDArray[np.float32] = self._gather(ops.linear(rows, self._head, None, sizes.vocab), sizes.vocab_widths)
        if spec.logit_scale != 1.0:
            logits *= np.float32(spec.logit_scale)
        return ops.soft_cap(logits, spec.logit_cap) if spec.logit_cap else logits

    def _linear(
        self, index: int, product: str, x: Array, w: Array, bias: Array | None, out: int, batch: ForwardBatch
    ) -> Array:
        """A product of a layer, with what the rows' adapters add to it."""
        y = self._ops.linear(x, w, bias, out)
        if batch.adapters is not None:
            assert self.shard.size == 1, "adapters are refused where several parts compute a model"
            batch.adapters.add(self._ops, self.spec, index, product, x, y)
        return y

    def _mix(self, index: int, x: Array, batch: ForwardBatch) -> Array:
        """What the MLP, or the experts that each token chooses, make of x."""
        ops, spec, sizes, layer = self._ops, self.spec, self._sizes, self._layers[index]
        if layer.experts is not None:
            return layer.experts.mix(x, spec, ops, self._gate)
        assert layer.mlp is not None
        inner = self._gate(self._linear(index, "gate_up", x, layer.mlp.gate_up, None, 2 * sizes.inner, batch))
        inner = self._gather(inner, sizes.inner_widths)
        down = self._linear(index, "down", inner, layer.mlp.down, None, sizes.hidden, batch)
        return self._gather(down, sizes.hidden_widths)

    def _attend(self, index: int, x: Array, batch: ForwardBatch, kv_layer: Array) -> Array:
        ops, spec, sizes, layer = self._ops, self.spec, self._sizes, self._layers[index]
        num_heads, keys_end = sizes.heads, sizes.heads + sizes.kv_heads
        num_fused = keys_end + sizes.kv_heads
        fused = self._linear(index, "qkv", x, layer.qkv, layer.qkv_bias, num_fused * spec.head_dim, batch)
        heads = fused.reshape(-1, num_fused, spec.head_dim)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:keys_end], heads[:, keys_end:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (self._norm_heads(part, weight) for part, weight in ((q, layer.q_norm), (k, layer.k_norm)))
        ops.rope(q, k, batch.positions, layer.rope.cos, layer.rope.sin)
        ops.write_kv(k, v, kv_layer, batch.slot_map)
        mixed = ops.attention(q, kv_layer, batch, spec.score_scale, layer.window, spec.attn_cap)
        mixed = self._gather(mixed.reshape(-1, num_heads * spec.head_dim), sizes.mixed_widths)
        return self._gather(self._linear(index, "o", mixed, layer.o, None, sizes.hidden, batch), sizes.hidden_widths)

    def _norm_heads(self, part: Array, weight: Array) -> Array:
        """Heads [T, n, D], each normed, or all of a token as one."""
        if not self.spec.qk_norm_is_wide:
            return self._ops.rms_norm(part, weight, self.spec.norm_eps)
        wide = part.reshape(len(part), -1)
        return self._ops.rms_norm(wide, weight, self.spec.norm_eps).reshape(part.shape)


def _layer(weights: ModelWeights[Array], prefix: str, window: int, rope: RopeTable) -> _Layer:
    tensors = weights.tensors
    return _Layer(
        attn_norm=tensors.get(prefix + "attn_norm"),
        attn_out_norm=tensors.get(prefix + "attn_out_norm"),
        qkv=tensors[prefix + "qkv"],
        qkv_bias=tensors.get(prefix + "qkv_bias"),
        q_norm=tensors.get(prefix + "q_norm"),
        k_norm=tensors.get(prefix + "k_norm"),
        o=tensors[prefix + "o"],
        mlp_norm=tensors.get(prefix + "mlp_norm"),
        mlp_out_norm=tensors.get(prefix + "mlp_out_norm"),
        mlp=read_mlp(tensors, prefix),
        experts=read_experts(tensors, prefix),
        window=window,
        rope=rope,
    )
