"""What happens between the products: embedding, residual, RMSNorm, SiLU. One program per token, float32 inside.

The residual is kept in the weights' own format, so a token's bits do not depend on which kernel rounds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.launch import wait_for_inputs


@triton.jit
def _normed(x, weight, i, eps, H: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    return x * scale * tl.load(weight + i, mask=i < H, other=0.0).to(tl.float32)


@triton.jit
def embed_norm(tokens, table, weight, residual, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """residual[t] = table[tokens[t]]; out[t] = its norm."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(table + tl.load(tokens + t).to(tl.int64) * H + i, mask=i < H, other=0.0)
    tl.store(residual + t * H + i, x, mask=i < H)
    tl.store(out + t * H + i, _normed(x.to(tl.float32), weight, i, eps, H).to(out.dtype.element_ty), mask=i < H)


@triton.jit
def add_norm(y, residual, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """residual[t] += y[t]; out[t] = its norm."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = t * H + i
    x = tl.load(residual + at, mask=i < H, other=0.0).to(tl.float32)
    x = (x + tl.load(y + at, mask=i < H, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(residual + at, x, mask=i < H)
    tl.store(out + at, _normed(x.to(tl.float32), weight, i, eps, H).to(out.dtype.element_ty), mask=i < H)


@triton.jit
def gather_norm(y, residual, weight, sampled, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[s] = norm of residual + y of token sampled[s]; several samples may read one token."""
    wait_for_inputs(PDL)
    s = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = tl.load(sampled + s).to(tl.int64) * H + i
    x = tl.load(residual + at, mask=i < H, other=0.0).to(tl.float32)
    x = (x + tl.load(y + at, mask=i < H, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(out + s * H + i, _normed(x.to(tl.float32), weight, i, eps, H).to(out.dtype.element_ty), mask=i < H)


@triton.jit
def gated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def silu_mul(gate_up, out, INNER, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = silu(gate) * up, gate being the first half of gate_up[t]."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + t * (2 * INNER) + i, mask=i < INNER, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * (2 * INNER) + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    tl.store(out + t * INNER + i, gated(gate, up).to(out.dtype.element_ty), mask=i < INNER)
