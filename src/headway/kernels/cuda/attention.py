"""Paged attention: decode rows, and chunks of prompts, with the same bits for the same token.

    context      |---- segment 0 ----|---- segment 1 ----|-- segment 2 --|        segment_cells(L) cells each
    tiles        [16][16][16][16]     [16][16]...                                 one online softmax per segment
    result       ((segment 0 + segment 1) + segment 2)                            merged from left to right, always

A token's bits depend on its own context alone: tiles have 16 cells, segments a size that follows from the context's
length, and both kernels merge segments from left to right in float32. Decode may give a whole row to one program or one
segment to each of several; what is stored in between is exactly what would have stayed in registers.

Cells of e4m3 and int8 become float16, which holds all of them, on the way to the tensor cores; a key's factor is
applied to its score, a value's to its weight.

    m largest score, t total of weights, acc weighted values; M, S, A the same, merged over segments
    H query heads, KVH key heads, G = H / KVH, D head size; how a layer's cells lie says `ops.KVCells`
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.cuda.launch import wait_for_inputs
from headway.kernels.cuda.rope import INT8_ZERO

TILE = 16  # cells of a tile; another size gives other bits
LOG2_E = 1.4426950408889634
MAX_SEGMENTS = 32
_HIGH = tl.constexpr(-65536)  # the high half of a word
MAX_ROWS = 64  # tokens times query heads of a key head in a prefill item


@triton.jit
def segment_cells(length):
    """Cells per segment of a context of so many cells: at most 16 segments up to 8,192 cells, at most 32 beyond."""
    cells = tl.where(length > 1024, 256, 64)
    cells = tl.where(length > 2048, 512, cells)
    cells = tl.where(length > 8192, 1024, cells)
    return tl.where(length > 32768, tl.cdiv(tl.cdiv(length, 32), 1024) * 1024, cells)


def host_segment_cells(length: int) -> int:
    """As `segment_cells`."""
    for most, cells in ((1024, 64), (2048, 256), (8192, 512), (32768, 1024)):
        if length <= most:
            return cells
    return (length + 1024 * MAX_SEGMENTS - 1) // (1024 * MAX_SEGMENTS) * 1024


def segment_ends(max_len: int) -> list[int]:
    """Context lengths, ascending, after which `segment_cells` changes: no prefill item reaches over one."""
    return [1024, 2048, 8192, *range(32768, max(max_len, 32769), 32768)]


def is_aligned(queries: int) -> bool:
    """Whether prefill items of up to so many tokens end with tiles at no cost; if not, they straddle them.

    A token's values may be NaN, and 0 times NaN is too. It must reach no token of an earlier block, which others may
    share: either no item straddles tiles, or `prefill` leaves out what a row does not see, which takes 12 % longer.
    """
    return TILE % queries == 0


# Exact: 1,024 + x is the float16 whose high byte is 0x64 and whose low byte is x.
_FROM_INT8 = tl.constexpr("""{
.reg .b32 u, v, c;
mov.b32 c, 0x64806480;
prmt.b32 u, $2, 0x64646464, 0x4140;
prmt.b32 v, $2, 0x64646464, 0x4342;
sub.rn.f16x2 $0, u, c;
sub.rn.f16x2 $1, v, c;
}""")


@triton.jit
def _cells(x, KIND: tl.constexpr, SCALED: tl.constexpr):
    """Cells as numbers. Converting four of int8 one by one would take longer than reading them."""
    if SCALED == 2:
        x = tl.inline_asm_elementwise(_FROM_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif x.dtype == tl.uint8:
        x = x.to(tl.float32) - INT8_ZERO
    return x.to(KIND)


@triton.jit
def _tile(
    q, keys, values, scales, block, n0, h, row_limit, end, m, t, acc, scale_log2, sb, st, ss, d, D: tl.constexpr,
    DP: tl.constexpr, BS: tl.constexpr, TN: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
    PAIRED: tl.constexpr, STRADDLES: tl.constexpr
):  # fmt: skip
    """One step of online softmax over the cells n0 to n0 + 16, which are all of one block.

    SCALED: cells of a byte, with factors; 2: int8 on a device. PAIRED: q is in the order of `_paired`, and such keys
    are to be brought into it. STRADDLES: some rows may see no cell of the tile.
    """
    j = tl.arange(0, TN)
    n = n0 + j
    if SCALED > 0:
        slot = tl.multiple_of(n0 % BS, TN)  # Triton reads values in 16 bytes at a time only if it knows
        factors = tl.load(scales + (block * ss + h * BS + slot) + j)
        scale_log2 *= (factors << 16).to(tl.float32, bitcast=True)[None, :]
        at = (block * sb + (h * BS + slot) * D) + j[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=(d < D)[None, :], other=0.0) if D < DP else tl.load(keys + at)
        if PAIRED:
            k = tl.permute(tl.reshape(k, [TN, DP // 32, 2, 4, 2, 2]), [0, 1, 4, 2, 3, 5]).reshape([TN, DP])
        k = _cells(k, q.dtype, SCALED)
    else:
        there = (n < end)[:, None] & (d < D)[None, :] if D < DP else (n < end)[:, None]
        at = (block * sb + (n0 % BS) * st + h * D) + j[:, None] * st + d[None, :]
        k = tl.load(keys + at, mask=there, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    score = tl.where(n[None, :] < row_limit[:, None], score, -float("inf"))
    top = tl.maximum(m, tl.max(score, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)  # a row that sees no cell of the tile
    p = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(m - safe)
    t = tl.fma(t, shrink, tl.sum(p, 1))
    if SCALED > 0:
        # A cell behind the end may hold anything but NaN; its factor may be NaN.
        p *= tl.where(n < end, (factors & _HIGH).to(tl.float32, bitcast=True), 0.0)[None, :]
        if STRADDLES:
            p = tl.where(n[None, :] < row_limit[:, None], p, 0.0)
        at = (block * sb + h * (D * BS) + slot) + d[:, None] * BS + j[None, :]
        v = tl.load(values + at, mask=(d < D)[:, None], other=0.0) if D < DP else tl.load(values + at)
        v = tl.trans(_cells(v, q.dtype, SCALED))
    else:
        v = tl.load(values + at, mask=there, other=0.0)
    mixed = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
    if STRADDLES and SCALED == 0:
        mixed = tl.where((n0 < row_limit)[:, None], mixed, acc)
    return top, t, mixed


@triton.jit
def _paired(d):
    """The order in which one warp's tensor cores add up 32 products with keys of a byte: even pairs first.

    A warp holds four adjacent bytes of a key, and 16 products at a time take the first two of each four. The tensor
    cores of four warps together take 16 adjacent ones: to have the same bits, they get them in this order.
    """
    return d // 32 * 32 + d // 8 % 2 * 16 + d // 2 % 4 * 4 + d // 16 % 2 * 2 + d % 2


@triton.jit
def _merge(m, t, acc, m2, t2, acc2):
    """The softmax over the cells of both. Each may be empty; beside an empty one the other stays exactly as it is."""
    top = tl.maximum(m, m2)
    safe = tl.where(top == -float("inf"), 0.0, top)
    left = tl.exp2(m - safe)
    right = tl.exp2(m2 - safe)
    t = tl.fma(t, left, t2 * right)
    acc = tl.fma(acc, left[:, None] + tl.zeros_like(acc), acc2 * right[:, None])
    return top, t, acc


@triton.jit
def decode(
    qkv, keys, values, scales, tables, items, num_items, turn, out, part_acc, part_m, part_l, done, scale_log2, sb, st,
    ss, TW, QS, G: tl.constexpr, GM: tl.constexpr, GP: tl.constexpr, KVH: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, TN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs take items in turn. An item is (entry of the step, segment or -1 for all at once, row, context, the
    entry's first item)."""
    wait_for_inputs(PDL)
    total = tl.load(num_items) * KVH
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    there = (g < G)[:, None] & (d < D)[None, :]
    w = tl.program_id(0)
    while w < total:
        following = total
        if total > tl.num_programs(0):
            # Asked for early: the answer is there when this item is done.
            following = tl.atomic_add(turn, 1) + tl.num_programs(0)
        item = w // KVH
        h = w % KVH
        b = tl.load(items + 8 * item).to(tl.int64)
        s = tl.load(items + 8 * item + 1)
        table = tables + tl.load(items + 8 * item + 2).to(tl.int64) * TW
        L = tl.load(items + 8 * item + 3)
        seg = segment_cells(L)
        lo = tl.maximum(s, 0) * seg
        hi = tl.where(s < 0, L, tl.minimum(L, lo + seg))
        head = (h * G + g)[:, None] * D + d[None, :]
        q = tl.load(qkv + b * QS + head, mask=there, other=0.0)
        if SCALED > 0:
            q = q.to(tl.float16)
        limit = tl.full([GP], 0, tl.int32) + hi
        m, t, acc = _nothing(GP, DP)
        M, S, A = m, t, acc
        for n0 in tl.range(lo, hi, TN, num_stages=STAGES):
            block = tl.load(table + n0 // BS).to(tl.int64)
            m, t, acc = _tile(
                q, keys, values, scales, block, n0, h, limit, hi, m, t, acc, scale_log2, sb, st, ss, d,
                D, DP, BS, TN, PRECISION, SCALED, False, False,
            )  # fmt: skip
            if ((n0 + TN) % seg == 0) | (n0 + TN >= hi):
                M, S, A = _merge(M, S, A, m, t, acc)
                m, t, acc = _nothing(GP, DP)
        num = tl.cdiv(L, seg)
        if s < 0:
            tl.store(out + b * (KVH * G * D) + head, (A / S[:, None]).to(out.dtype.element_ty), mask=there)
        elif _put_part(
            part_acc, part_m, part_l, done + b * KVH + h, M, S, A, item, num, KVH * G, h * G + g, g < G, d, D
        ):  # fmt: skip
            # As many rows as there are heads: of the tensor cores' 16 most would be empty.
            j = tl.arange(0, GM)
            dest = out + b * (KVH * G * D) + (h * G + j) * D
            _put_merged(
                part_acc, part_m, part_l, tl.load(items + 8 * item + 4), num, KVH * G, h * G + j, j < G, dest, d,
                GM, D, DP,
            )  # fmt: skip
        w = following


@triton.jit
def _nothing(ROWS: tl.constexpr, DP: tl.constexpr):
    """The softmax over no cell at all."""
    m = tl.full([ROWS], -float("inf"), tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DP], tl.float32)


@triton.jit
def _put_part(part_acc, part_m, part_l, done, M, S, A, item, num, WIDTH, line, is_line, d, D: tl.constexpr):
    """Store a segment, WIDTH lines for each item; whether it was the last one of `num` that count up `done`."""
    first = item.to(tl.int64) * WIDTH
    there = is_line[:, None] & (d < D)[None, :]
    tl.store(part_acc + first * D + (line[:, None] * D + d[None, :]), A, mask=there)
    tl.store(part_m + first + line, M, mask=is_line)
    tl.store(part_l + first + line, S, mask=is_line)
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1, sem="acq_rel") == num - 1
    if is_last:
        tl.debug_barrier()
        tl.store(done, 0)
    return is_last


@triton.jit
def _part(part_acc, part_m, part_l, first, line, is_line, d, D: tl.constexpr):
    """Lines of a segment that was stored."""
    there = is_line[:, None] & (d < D)[None, :]
    # .cg: from the cache that all programs share, never from this multiprocessor's own.
    m = tl.load(part_m + first + line, mask=is_line, other=0.0, cache_modifier=".cg")
    t = tl.load(part_l + first + line, mask=is_line, other=1.0, cache_modifier=".cg")
    place = part_acc + first * D + (line[:, None] * D + d[None, :])
    return m, t, tl.load(place, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _put_merged(
    part_acc, part_m, part_l, first, num, WIDTH, line, is_line, dest, d, ROWS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr
):  # fmt: skip
    """To `dest`, the softmax over the segments of `num` items from `first` on, merged in their order.

    Four are read at a time, because reading takes longer than merging: ROWS are to be few.
    """
    M, S, A = _nothing(ROWS, DP)
    for z in range(0, num, 4):
        at = (first + z).to(tl.int64) * WIDTH
        m, t, acc = _part(part_acc, part_m, part_l, at, line, is_line, d, D)
        m1, t1, acc1 = _part(part_acc, part_m, part_l, at + WIDTH, line, is_line & (z + 1 < num), d, D)
        m2, t2, acc2 = _part(part_acc, part_m, part_l, at + 2 * WIDTH, line, is_line & (z + 2 < num), d, D)
        m3, t3, acc3 = _part(part_acc, part_m, part_l, at + 3 * WIDTH, line, is_line & (z + 3 < num), d, D)
        M, S, A = _merge(M, S, A, m, t, acc)
        if z + 1 < num:
            M, S, A = _merge(M, S, A, m1, t1, acc1)
        if z + 2 < num:
            M, S, A = _merge(M, S, A, m2, t2, acc2)
        if z + 3 < num:
            M, S, A = _merge(M, S, A, m3, t3, acc3)
    mixed = (A / S[:, None]).to(dest.dtype.element_ty)
    tl.store(dest[:, None] + d[None, :], mixed, mask=is_line[:, None] & (d < D)[None, :])


@triton.jit
def prefill(
    qkv, keys, values, scales, tables, packet, items_at, count_at, out, part_acc, part_m, part_l, done, scale_log2, sb,
    st, ss, TW, QS, G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MQ: tl.constexpr,
    RG: tl.constexpr, BS: tl.constexpr, TN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, STRADDLES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """An item of the packet is (first token, tokens, row, first position) of adjacent tokens of one segment size, with
    (segment or -1 for all at once, its part, the first of these tokens' parts, the tokens' number among those cut)."""
    wait_for_inputs(PDL)
    total = tl.load(packet + count_at) * KVH
    items = packet + tl.load(packet + items_at)
    d = tl.arange(0, DP)
    i = tl.arange(0, MQ)
    for w in range(tl.program_id(0), total, tl.num_programs(0)):
        item = items + (w // KVH) * 8
        h = w % KVH
        first = tl.load(item).to(tl.int64)
        num = tl.load(item + 1)
        start = tl.load(item + 3)
        tok = i // G
        head = (first + tok) * QS + (h * G + i % G) * D
        dest = ((first + tok) * (KVH * G * D) + (h * G + i % G) * D)[:, None] + d[None, :]
        there = (tok < num)[:, None] & (d < D)[None, :]
        if SCALED > 0:
            e = _paired(d)
            q = tl.load(qkv + head[:, None] + e[None, :], mask=(tok < num)[:, None] & (e < D)[None, :], other=0.0)
            q = q.to(tl.float16)
        else:
            q = tl.load(qkv + head[:, None] + d[None, :], mask=there, other=0.0)
        limit = start + tl.minimum(tok, num - 1) + 1
        end = start + num
        seg = segment_cells(end)
        s = tl.load(item + 4)
        lo = tl.maximum(s, 0) * seg
        hi = tl.where(s < 0, end, tl.minimum(end, lo + seg))
        M, S, A = _nothing(MQ, DP)
        table = tables + tl.load(item + 2).to(tl.int64) * TW
        for s0 in range(lo, hi, seg):
            m, t, acc = _nothing(MQ, DP)
            for n0 in tl.range(s0, tl.minimum(s0 + seg, hi), TN, num_stages=STAGES):
                block = tl.load(table + n0 // BS).to(tl.int64)
                m, t, acc = _tile(
                    q, keys, values, scales, block, n0, h, limit, end, m, t, acc, scale_log2, sb, st, ss, d,
                    D, DP, BS, TN, PRECISION, SCALED, SCALED > 0, STRADDLES,
                )  # fmt: skip
            M, S, A = _merge(M, S, A, m, t, acc)
        if s < 0:
            tl.store(out + dest, (A / S[:, None]).to(out.dtype.element_ty), mask=there)
        elif _put_part(
            part_acc, part_m, part_l, done + tl.load(item + 7) * KVH + h, M, S, A, tl.load(item + 5),
            tl.cdiv(end, seg), KVH * MQ, h * MQ + i, tok < num, d, D,
        ):  # fmt: skip
            # A few lines at a time: all of them would take more registers than the rest of the kernel.
            for line in range(0, num * G, RG):
                j = line + tl.arange(0, RG)
                _put_merged(
                    part_acc, part_m, part_l, tl.load(item + 6), tl.cdiv(end, seg), KVH * MQ, h * MQ + j, j < num * G,
                    out + (first + j // G) * (KVH * G * D) + (h * G + j % G) * D, d, RG, D, DP,
                )  # fmt: skip
