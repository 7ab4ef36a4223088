"""Products of few rows, with what follows them: rotary positions and KV cells after qkv, SiLU after gate and up.

Reading the weights once is all the time such a step has, so a kernel less is a gap less. The weight's rows are the
tensor cores' M: many programs each read a few of them, K in one order, which gives the bits of cuBLASLt without splits.
What follows has the bits of `rope` and `norms`: results are rounded to the weights' format in between, as there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.kernels.cuda.launch import AFTER_READING, AT_END, AT_START, Launch, end_of_reading, wait_for_inputs
from headway.kernels.cuda.norms import gated
from headway.kernels.cuda.ops import Heads, KVCells
from headway.kernels.cuda.rope import rotate

MAX_ROWS = 32
_AHEAD = 512  # columns of its weights that a program asks for before its inputs are there, if successors come early

# (outputs of a program, columns at a time, stages), found by measurement; none of them changes a bit.
_NARROW = (64, 256, 4)  # up to 8,192 outputs
_DEEP = (64, 128, 8)  # and more than 8,192 columns
_WIDE = (128, 128, 4)
_FP8 = (64, 512, 4)  # up to MAX_ROWS rows of e4m3
_MANY = (128, 64, 4)  # more than MAX_ROWS rows
_GATE_UP = (64, 128, 4)
_QKV = (32, 256, 4)
_FLOAT32 = (64, 32, 32)  # outputs, rows and columns; the same for any number of rows


@triton.jit
def _ask(w, first, K, BW: tl.constexpr, AHEAD: tl.constexpr):
    """Bring the first columns of rows first to first + BW into the shared cache: they wait for no other kernel."""
    place = (first + tl.arange(0, BW)).to(tl.int64)[:, None] * K + (tl.arange(0, AHEAD // 64) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(w + place).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])
def _product(
    w_desc, x_desc, w, out, M, N, K, BW: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """One program per BW outputs and BX rows."""
    first = tl.program_id(0) * BW
    row = tl.program_id(1) * BX
    if AHEAD > 0:
        _ask(w, first, K, BW, AHEAD)
    wait_for_inputs(PDL)
    acc = tl.zeros([BW, BX], tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(w_desc.load([first, k]), x_desc.load([row, k]).T, acc)
    end_of_reading(PDL)
    n = first + tl.arange(0, BW)
    m = (row + tl.arange(0, BX)).to(tl.int64)
    tl.store(
        out + m[:, None] * N + n[None, :],
        tl.trans(acc).to(out.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


@triton.jit(do_not_specialize=["M"])
def _float32(
    x, w, out, M, N, K, BW: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program per BW outputs and BX rows, one multiplication after the other."""
    n = (tl.program_id(0) * BW + tl.arange(0, BW)).to(tl.int64)
    m = (tl.program_id(1) * BX + tl.arange(0, BX)).to(tl.int64)
    wait_for_inputs(PDL)
    acc = tl.zeros([BX, BW], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(w + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _gate_up(
    w_desc, x_desc, w, out, M, INNER, K, BW: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """One program per BW gates and their ups."""
    first = tl.program_id(0) * BW
    if AHEAD > 0:
        _ask(w, first, K, BW, AHEAD)
        _ask(w, INNER + first, K, BW, AHEAD)
    wait_for_inputs(PDL)
    gate = tl.zeros([BW, BX], tl.float32)
    up = tl.zeros([BW, BX], tl.float32)
    for k in range(0, K, BK):
        x = x_desc.load([0, k]).T
        gate = tl.dot(w_desc.load([first, k]), x, gate)
        up = tl.dot(w_desc.load([INNER + first, k]), x, up)
    end_of_reading(PDL)
    kind = out.dtype.element_ty
    y = gated(tl.trans(gate).to(kind).to(tl.float32), tl.trans(up).to(kind).to(tl.float32))
    n = first + tl.arange(0, BW)
    m = tl.arange(0, BX)
    tl.store(out + m[:, None] * INNER + n[None, :], y.to(kind), mask=(m < M)[:, None] & (n < INNER)[None, :])


@triton.jit(do_not_specialize=["M"])
def _qkv(
    w_desc, x_desc, w, qkv, cos, sin, positions, slot_map, keys, values, sb, st, M, K, H: tl.constexpr,
    KVH: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program per BW places of a head's first half and the same places of its second."""
    HALF: tl.constexpr = D // 2
    parts: tl.constexpr = HALF // BW
    h = tl.program_id(0) // parts
    i = (tl.program_id(0) % parts) * BW + tl.arange(0, BW)
    first = h * D + (tl.program_id(0) % parts) * BW
    if AHEAD > 0:
        _ask(w, first, K, BW, AHEAD)
        _ask(w, first + HALF, K, BW, AHEAD)
    wait_for_inputs(PDL)
    a = tl.zeros([BW, BX], tl.float32)
    b = tl.zeros([BW, BX], tl.float32)
    for k in range(0, K, BK):
        x = x_desc.load([0, k]).T
        a = tl.dot(w_desc.load([first, k]), x, a)
        b = tl.dot(w_desc.load([first + HALF, k]), x, b)
    end_of_reading(PDL)
    kind = qkv.dtype.element_ty
    a = tl.trans(a).to(kind).to(tl.float32)  # [BX, BW]
    b = tl.trans(b).to(kind).to(tl.float32)
    m = tl.arange(0, BX)
    is_row = (m < M)[:, None] & (i >= 0)[None, :]
    if h < H + KVH:
        angle = tl.load(positions + m, mask=m < M, other=0)[:, None] * HALF + i[None, :]
        a, b = rotate(a, b, tl.load(cos + angle, mask=is_row, other=0.0), tl.load(sin + angle, mask=is_row, other=0.0))
    if h < H:
        dest = qkv + m[:, None] * ((H + 2 * KVH) * D) + h * D + i[None, :]
        tl.store(dest, a.to(kind), mask=is_row)
        tl.store(dest + HALF, b.to(kind), mask=is_row)
    else:
        cell = tl.load(slot_map + m, mask=m < M, other=-1).to(tl.int64)
        is_row = is_row & (cell >= 0)[:, None]
        at = ((cell // BS) * sb + (cell % BS) * st)[:, None] + i[None, :]
        if h < H + KVH:  # noqa: SIM108  # Triton's
            dest = keys + at + (h - H) * D
        else:
            dest = values + at + (h - H - KVH) * D
        tl.store(dest, a.to(keys.dtype.element_ty), mask=is_row)
        tl.store(dest + HALF, b.to(keys.dtype.element_ty), mask=is_row)


def product(x: Tensor, w: Tensor, out: Tensor, launch: Launch, *, tile: tuple[int, int, int] | None = None) -> None:
    """out [rows, N] = x [rows, K] times w [N, K] transposed; `tile` (outputs, columns, stages) changes no bit.

    Any number of rows; beyond MAX_ROWS only where no library has its bits.
    """
    num_out, inner = w.shape
    columns = _columns(x)
    width, depth, stages = tile or _tile(columns, num_out, inner, w.itemsize)
    _product[(triton.cdiv(num_out, width), triton.cdiv(x.shape[0], columns))](
        *(_described(w, width, depth), _described(x, columns, depth), w, out, x.shape[0], num_out, inner),
        **_tiles(width, columns, depth, stages, inner, launch, *_turn(columns, num_out, inner)),
    )


def float32_product(x: Tensor, w: Tensor, out: Tensor, launch: Launch) -> None:
    """As `product`, in float32 and for any number of rows: no library has one order for all of them."""
    width, rows, depth = _FLOAT32
    _float32[(triton.cdiv(w.shape[0], width), triton.cdiv(x.shape[0], rows))](
        *(x, w, out, x.shape[0], w.shape[0], w.shape[1]),
        **{"BW": width, "BX": rows, "BK": depth, "num_warps": 4, **launch.options()},
    )


def _turn(columns: int, num_out: int, inner: int) -> tuple[int, int]:
    """When the successor comes, and the columns asked for ahead, where successors do not all come early."""
    if columns > MAX_ROWS or num_out > 8192:
        return AT_END, 0
    # A norm comes next, of so few programs that they are in no other's way.
    return (AFTER_READING, 0) if inner > 8192 else (AT_START, 256)


def _tile(columns: int, num_out: int, inner: int, itemsize: int) -> tuple[int, int, int]:
    if columns > MAX_ROWS:
        return _MANY
    if itemsize == 1:
        return _FP8
    if num_out > 8192:
        return _WIDE
    return _NARROW if inner <= 8192 else _DEEP


def gate_up_silu(x: Tensor, w: Tensor, out: Tensor, launch: Launch) -> None:
    """out [rows, I] = silu(gate) * up, both being halves of x times w [2 I, K] transposed."""
    width, depth, stages = _GATE_UP
    columns = _columns(x)
    _gate_up[(triton.cdiv(out.shape[1], width),)](
        *(_described(w, width, depth), _described(x, columns, depth), w, out, x.shape[0], out.shape[1], w.shape[1]),
        **_tiles(width, columns, depth, stages, w.shape[1], launch, AFTER_READING, 256),
    )


def can_rotate(heads: Heads) -> bool:
    """Whether `qkv_rope` takes heads of this size."""
    return heads.dim % 64 == 0


def qkv_rope(
    x: Tensor,
    w: Tensor,
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    slot_map: Tensor,
    kv: KVCells,
    heads: Heads,
    launch: Launch,
) -> None:
    """Queries of qkv [rows, (H + 2 KVH) D], rotated; keys, rotated, and values to their cells of the layer `kv`."""
    width, depth, stages = _QKV
    columns = _columns(x)
    _qkv[((heads.num + 2 * heads.kv) * heads.dim // (2 * width),)](
        *(_described(w, width, depth), _described(x, columns, depth), w, qkv, *rope, positions, slot_map),
        *(kv.keys, kv.values, kv.keys.stride(0), kv.keys.stride(1), x.shape[0], w.shape[1]),
        **{"H": heads.num, "KVH": heads.kv, "D": heads.dim, "BS": heads.block_size},
        **_tiles(width, columns, depth, stages, w.shape[1], launch, AFTER_READING, 512),
    )


def _columns(x: Tensor) -> int:
    return min(64, max(16, int(triton.next_power_of_2(x.shape[0]))))


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _tiles(
    width: int, columns: int, depth: int, stages: int, inner: int, launch: Launch, successor: int, ahead: int
) -> dict[str, object]:
    ahead = _AHEAD if launch.is_early else ahead
    if not launch.is_dependent or not ahead or inner % ahead:
        ahead = 0
    tiles = {"BW": width, "BX": columns, "BK": depth, "AHEAD": ahead, "num_stages": stages, "num_warps": 4}
    return {**tiles, **launch.options(successor)}
