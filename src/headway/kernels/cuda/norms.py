"""What happens between the products: embedding, residual, RMSNorm, SiLU. One program per token, float32 inside.

The residual is kept in the activations' format, so a token's bits do not depend on which kernel rounds it. Where the
next product is one of e4m3, a row is rounded to that with a factor of its own; where the last one was, its factors are
applied here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.launch import wait_for_inputs

LARGEST = tl.constexpr(448.0)  # of e4m3
_LEAST = tl.constexpr(1e-30)  # a row of zeros has a factor too


@triton.jit
def put_row(x, out, at, here, scale, SCALED: tl.constexpr):
    """Store a row; SCALED: in e4m3, its factor at `scale`."""
    if SCALED:
        largest = tl.maximum(tl.max(tl.abs(x), 0), _LEAST)
        tl.store(scale, largest / LARGEST)
        x = x * (LARGEST / largest)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=here)


@triton.jit
def _added(y, before, at, i, y_row, y_columns, H: tl.constexpr, IN: tl.constexpr):
    """before + y, rounded as it was; IN: y has a factor per row, at `y_row`, and per column."""
    more = tl.load(y + at, mask=i < H, other=0.0).to(tl.float32)
    if IN:
        more = more * tl.load(y_row) * tl.load(y_columns + i, mask=i < H, other=0.0)
    return (before.to(tl.float32) + more).to(before.dtype)


@triton.jit
def _normed(x, factors, eps, H: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * factors.to(tl.float32)


@triton.jit
def embed_norm(
    tokens, table, weight, residual, out, scales, eps, H: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """residual[t] = table[tokens[t]]; out[t] = its norm."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    factors = tl.load(weight + i, mask=i < H, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(table + tl.load(tokens + t).to(tl.int64) * H + i, mask=i < H, other=0.0)
    tl.store(residual + t * H + i, x, mask=i < H)
    put_row(_normed(x.to(tl.float32), factors, eps, H), out, t * H + i, i < H, scales + t, OUT)


@triton.jit
def add_norm(
    y, y_rows, y_columns, residual, weight, out, scales, eps, H: tl.constexpr, BLOCK: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """residual[t] += y[t]; out[t] = its norm."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = t * H + i
    # The weights lie in no cache, and the last norm wrote the residual: y alone is the predecessor's.
    factors = tl.load(weight + i, mask=i < H, other=0.0)
    before = tl.load(residual + at, mask=i < H, other=0.0)
    wait_for_inputs(PDL)
    x = _added(y, before, at, i, y_rows + t, y_columns, H, IN)
    tl.store(residual + at, x, mask=i < H)
    put_row(_normed(x.to(tl.float32), factors, eps, H), out, at, i < H, scales + t, OUT)


@triton.jit
def gather_norm(
    y, y_rows, y_columns, residual, weight, sampled, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, IN: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """out[s] = norm of residual + y of token sampled[s]; several samples may read one token."""
    s = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    factors = tl.load(weight + i, mask=i < H, other=0.0)
    t = tl.load(sampled + s).to(tl.int64)
    before = tl.load(residual + t * H + i, mask=i < H, other=0.0)
    wait_for_inputs(PDL)
    x = _added(y, before, t * H + i, i, y_rows + t, y_columns, H, IN)
    tl.store(out + s * H + i, _normed(x.to(tl.float32), factors, eps, H).to(out.dtype.element_ty), mask=i < H)


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


@triton.jit
def silu_mul_scaled(
    gate_up, rows, columns, out, scales, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """As `silu_mul`, a product of e4m3 in and a row of e4m3 out: the whole row is one program's."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    row = tl.load(rows + t)
    here = i < INNER
    line = gate_up + t * (2 * INNER)
    gate = tl.load(line + i, mask=here, other=0.0).to(tl.float32) * row * tl.load(columns + i, mask=here, other=0.0)
    up = tl.load(line + INNER + i, mask=here, other=0.0).to(tl.float32) * row
    up = up * tl.load(columns + INNER + i, mask=here, other=0.0)
    put_row(gated(gate, up), out, t * INNER + i, here, scales + t, True)


@triton.jit
def quantize(x, out, scales, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Rows in e4m3, each with its factor."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + t * H + i, mask=i < H, other=0.0).to(tl.float32)
    put_row(values, out, t * H + i, i < H, scales + t, True)
