"""An oracle for decoders on a device: plain torch in float64, without cache, blocks, chunks or batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from headway.models.cuda import SCALE
from headway.models.params import ModelWeights
from headway.models.spec import ModelSpec

_SCORES = 1 << 25  # at a time, 8 bytes each
_TOKENS = 1024  # of the MLP at a time


def plain_logits(spec: ModelSpec, weights: ModelWeights[Tensor], tokens: Sequence[int], num: int = 1) -> Tensor:
    """Logits behind each of the last `num` tokens, [num, vocab] float64, on the weights' device."""
    embed = weights["embed"]
    x = embed[torch.tensor(tokens, device=embed.device)].double()
    for index in range(spec.layers):
        layer = f"layers.{index}."
        x = x + _attended(spec, weights, layer, _normed(spec, x, weights[layer + "attn_norm"]))
        gate_up, down = _matrix(weights, layer + "gate_up"), _matrix(weights, layer + "down")
        for part in x.split(_TOKENS):
            gate, up = (_normed(spec, part, weights[layer + "mlp_norm"]) @ gate_up.t()).chunk(2, 1)
            part += (silu(gate) * up) @ down.t()
    head = embed if spec.tie_embeddings else weights["head"]
    last = _normed(spec, x[-num:], weights["norm"])
    return torch.cat([last @ part.double().t() for part in head.split(_TOKENS * 8)], 1)


def _matrix(weights: ModelWeights[Tensor], name: str) -> Tensor:
    factors = weights.tensors.get(name + SCALE)
    values = weights[name].double()
    return values if factors is None else values * factors.double()[:, None]


def _normed(spec: ModelSpec, x: Tensor, factors: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * factors.double()


def _rotated(spec: ModelSpec, x: Tensor) -> Tensor:
    """[tokens, heads, size], halves turned together."""
    half = spec.head_dim // 2
    places = torch.arange(half, dtype=torch.float64, device=x.device)
    angle = torch.arange(len(x), dtype=torch.float64, device=x.device)[:, None] * spec.rope_theta ** (-places / half)
    a, b, c, s = x[..., :half], x[..., half:], angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def _attended(spec: ModelSpec, weights: ModelWeights[Tensor], layer: str, x: Tensor) -> Tensor:
    qkv = x @ _matrix(weights, layer + "qkv").t()
    if spec.qkv_bias:
        qkv = qkv + weights[layer + "qkv_bias"].double()
    heads = qkv.view(len(x), -1, spec.head_dim)
    q, k, v = heads.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
    if spec.qk_norm:
        q, k = (_normed(spec, part, weights[layer + name]) for part, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = _rotated(spec, q), _rotated(spec, k)
    groups = spec.heads // spec.kv_heads
    keys, values = (part.transpose(0, 1).contiguous() for part in (k, v))  # [KVH, tokens, D]
    at = torch.arange(len(x), device=x.device)
    mixed = []
    for mine in at.split(max(1, _SCORES // (spec.heads * len(x)))):
        asked = q[mine].unflatten(1, (spec.kv_heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = asked @ keys.transpose(1, 2) * spec.score_scale  # [KVH, G * rows, tokens]
        scores.masked_fill_((at > mine[:, None]).repeat(groups, 1), -float("inf"))
        found = scores.softmax(-1) @ values
        mixed.append(found.unflatten(1, (groups, len(mine))).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(mixed) @ _matrix(weights, layer + "o").t()
