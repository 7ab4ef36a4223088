"""Bias, head norms and rotary positions of a fused row of queries, keys and values; keys and values go to their cells.

Queries are written back in place. A token whose cell is -1 is padding and leaves nothing behind. Cells of e4m3 and int8
have a factor per head, in bfloat16: the least that holds its largest number. For keys of e4m3 larger ones are tried out
too, since they make nearly all of what e4m3 costs in quality, and how a key is rounded depends on where it lies between
two powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.launch import wait_for_inputs
from headway.kernels.cuda.norms import LARGEST

_LARGEST_INT8 = tl.constexpr(127.0)
_TRIALS = tl.constexpr(8)
_TRIAL = tl.constexpr(2 ** (1 / 8))
INT8_ZERO = tl.constexpr(128.0)  # what the byte of a cell of int8 has more than its number


@triton.jit
def rotate(a, b, c, s):
    """(a, b) turned by an angle; the rounding is spelled out, so that every kernel which rotates has the same bits."""
    return tl.fma(a, c + tl.zeros_like(a), -(b * s)), tl.fma(b, c + tl.zeros_like(b), a * s)


@triton.jit
def _cells(x, inverse, KIND: tl.constexpr):
    """Numbers of a head as cells, never NaN: what lies behind a context's end is multiplied by 0, not skipped."""
    x = x * inverse  # of an infinite factor 0: not even then NaN may stay
    x = tl.where(x == x, x, 0.0)
    if tl.uint8 == KIND:
        x = tl.minimum(tl.maximum(tl.floor(x + 0.5), -_LARGEST_INT8), _LARGEST_INT8) + INT8_ZERO
    return x.to(KIND)


@triton.jit
def _off(a, b, scale, KIND: tl.constexpr):
    """What rounding with these factors changes, squared and added up for each head."""
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)[:, None]
    a = (a * inverse).to(KIND).to(tl.float32) * scale[:, None] - a
    b = (b * inverse).to(KIND).to(tl.float32) * scale[:, None] - b
    return tl.sum(a * a, 1) + tl.sum(b * b, 1)


@triton.jit
def _tried_out(a, b, least, SCALE: tl.constexpr, KIND: tl.constexpr):
    """The best factor of each head within the octave above the least."""
    best = least.to(SCALE).to(tl.float32)
    error = _off(a, b, best, KIND)
    for _ in tl.static_range(1, _TRIALS):
        least = least * _TRIAL
        scale = least.to(SCALE).to(tl.float32)
        off = _off(a, b, scale, KIND)
        best = tl.where(off < error, scale, best)
        error = tl.minimum(off, error)
    return best


@triton.jit
def _put_scaled(
    a, b, keys, values, scales, h, i, cell, sb, ss, there, KVH: tl.constexpr, D: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Heads h of a cell, all keys or all values, which come after the keys; each head has a factor."""
    block = cell // BS
    slot = cell % BS
    is_key = tl.max(h, 0) < KVH
    largest: tl.constexpr = _LARGEST_INT8 if keys.dtype.element_ty == tl.uint8 else LARGEST
    scale = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)) / largest
    if keys.dtype.element_ty != tl.uint8:  # noqa: SIM102  # only this one is known when it is compiled
        if is_key:
            scale = _tried_out(a, b, scale, scales.dtype.element_ty, keys.dtype.element_ty)
    scale = scale.to(scales.dtype.element_ty)
    tl.store(scales + block * ss + ((h % KVH) * BS + slot) * 2 + tl.where(is_key, 0, 1), scale)
    scale = scale.to(tl.float32)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)[:, None]
    a = _cells(a, inverse, keys.dtype.element_ty)
    b = _cells(b, inverse, keys.dtype.element_ty)
    if is_key:
        dest = keys + block * sb + (h[:, None] * BS + slot) * D + i[None, :]
        tl.store(dest, a, mask=there)
        tl.store(dest + D // 2, b, mask=there)
    else:
        dest = values + block * sb + ((h - KVH)[:, None] * D + i[None, :]) * BS + slot
        tl.store(dest, a, mask=there)
        tl.store(dest + D // 2 * BS, b, mask=there)


@triton.jit
def rope_write(
    qkv, rows, columns, bias, q_norm, k_norm, cos, sin, positions, slot_map, keys, values, scales, eps, sb, st, ss,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HG: tl.constexpr, BS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, IN: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program per token and HG heads, all of one kind; a head's halves of D / 2 rotate together."""
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HG
    h = first + tl.arange(0, HG)
    i = tl.arange(0, HALF)
    there = (h >= 0)[:, None] & (i < D // 2)[None, :]
    within = h[:, None] * D + i[None, :]
    place = qkv + t * ((H + 2 * KVH) * D) + within
    a = tl.load(place, mask=there, other=0.0).to(tl.float32)
    b = tl.load(place + D // 2, mask=there, other=0.0).to(tl.float32)
    if IN:  # a product of e4m3
        row = tl.load(rows + t)
        a = a * row * tl.load(columns + within, mask=there, other=0.0)
        b = b * row * tl.load(columns + within + D // 2, mask=there, other=0.0)
    if HAS_BIAS:
        a += tl.load(bias + within, mask=there, other=0.0).to(tl.float32)
        b += tl.load(bias + within + D // 2, mask=there, other=0.0).to(tl.float32)
    if first < H + KVH:
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            half = i < D // 2
            if first < H:
                left = tl.load(q_norm + i, mask=half, other=0.0).to(tl.float32)
                right = tl.load(q_norm + D // 2 + i, mask=half, other=0.0).to(tl.float32)
            else:
                left = tl.load(k_norm + i, mask=half, other=0.0).to(tl.float32)
                right = tl.load(k_norm + D // 2 + i, mask=half, other=0.0).to(tl.float32)
            a = a * scale * left[None, :]
            b = b * scale * right[None, :]
        angle = tl.load(positions + t) * (D // 2) + i
        c = tl.load(cos + angle, mask=i < D // 2, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=i < D // 2, other=0.0)[None, :]
        a, b = rotate(a, b, c, s)
    if first < H:
        tl.store(place, a.to(qkv.dtype.element_ty), mask=there)
        tl.store(place + D // 2, b.to(qkv.dtype.element_ty), mask=there)
    else:
        cell = tl.load(slot_map + t).to(tl.int64)
        if cell >= 0:
            if SCALED:
                _put_scaled(a, b, keys, values, scales, h - H, i, cell, sb, ss, there, KVH, D, BS)
            else:
                start = (cell // BS) * sb + (cell % BS) * st
                if first < H + KVH:
                    dest = keys + start + (h - H)[:, None] * D + i[None, :]
                else:
                    dest = values + start + (h - H - KVH)[:, None] * D + i[None, :]
                tl.store(dest, a.to(keys.dtype.element_ty), mask=there)
                tl.store(dest + D // 2, b.to(keys.dtype.element_ty), mask=there)
