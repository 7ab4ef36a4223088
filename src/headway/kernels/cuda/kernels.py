"""`TritonKernels`: the operations of `ops` as Triton launches, with the tile shapes that measurement chose.

It owns launch shapes alone: what is computed stands in the files it imports.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.kernels.cuda import attention, few, norms, products
from headway.kernels.cuda.compile import is_trying
from headway.kernels.cuda.launch import AT_START, Launch, pow2
from headway.kernels.cuda.layout import Header
from headway.kernels.cuda.ops import DecodeWork, Heads, KVCells, Scaled
from headway.kernels.cuda.rope import rope_write

_GROUP = 16  # the tensor cores' least number of rows: a smaller group of query heads is padded to it
_SILU_BLOCK = 2048
_SILU_WARPS = 32  # where a program has a whole row of 8,192 and more
_PROGRAMS_LARGE = 8  # of decode attention per multiprocessor: as many as its registers hold
_PROGRAMS_SMALL = 12
_PROGRAMS_PER_ROW = 16  # of a key head: as many as a row of 8,192 cells has segments
_STAGES = 5  # of decode attention's reads
_STAGES_SCALED = 8  # where a cell is a byte
_MERGED_ROWS = 32  # lines of a cut prefill item that are merged at a time
_PREFILL_LARGE = 2  # programs of prefill attention per multiprocessor
_PREFILL_SMALL = 4
_PREFILL_REGISTERS = 128  # so that four fit; left alone, the compiler takes 160 and is no faster
_ROTATE_HIDDEN = 2048  # above, rotating within the product of qkv is faster than after it
_ROW_STEP = 32
_MORE_ROWS = 64  # that a product may be padded by to have the library's speed
_PROBES = 16  # rows by which a library's product is compared


class TritonKernels:
    """Tile shapes depend on the model's sizes alone, never on the number of rows where that would change bits."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        # By rows and matrix: whether the library has our bits.
        self._is_exact: dict[tuple[int, torch.Size, torch.dtype], bool] = {}

    def attention_programs(self, heads: Heads) -> int:
        return self._launch.num_sms * (_PROGRAMS_LARGE if heads.dim > 64 else _PROGRAMS_SMALL)

    def prefill_programs(self, heads: Heads) -> int:
        return self._launch.num_sms * (_PREFILL_LARGE if heads.dim > 64 else _PREFILL_SMALL)

    def embed_norm(
        self, tokens: Tensor, table: Tensor, weight: Tensor, residual: Tensor, out: Scaled, eps: float
    ) -> None:
        rows, hidden = residual.shape
        norms.embed_norm[(rows,)](
            *(tokens, table, weight, residual, *_stored(out), eps), OUT=out.rows is not None, **self._row(hidden)
        )

    def add_norm(self, y: Scaled, residual: Tensor, weight: Tensor, out: Scaled, eps: float) -> None:
        rows, hidden = residual.shape
        norms.add_norm[(rows,)](
            *(*_product(y), residual, weight, *_stored(out), eps),
            **{"IN": y.rows is not None, "OUT": out.rows is not None, **self._row(hidden)},
        )

    def gather_norm(
        self, y: Scaled, residual: Tensor, weight: Tensor, sampled: Tensor, out: Tensor, eps: float
    ) -> None:
        norms.gather_norm[(out.shape[0],)](
            *(*_product(y), residual, weight, sampled, out, eps), IN=y.rows is not None, **self._row(out.shape[1])
        )

    def quantize(self, x: Tensor, out: Scaled) -> None:
        norms.quantize[(x.shape[0],)](x, *_stored(out), **self._row(x.shape[1]))

    def linear(self, x: Scaled, w: Scaled, out: Tensor) -> Scaled:
        if x.values.dtype == torch.float32 and x.values.is_cuda:
            few.float32_product(x.values, w.values, out, self._launch)
            return Scaled(out)
        num = None if self._are_few(x.values) else self._library_rows(x.values, w.values, out)
        if num is None:
            few.product(x.values, w.values, out, self._launch)
        else:
            products.product(_lengthened(x.values, num), w.values, _lengthened(out, num))
        return Scaled(out, x.rows, w.rows)

    def gate_up(self, x: Scaled, w: Scaled, between: Tensor, out: Scaled) -> None:
        rows, inner = out.values.shape
        if out.rows is None and self._are_few(x.values):
            few.gate_up_silu(x.values, w.values, out.values, self._launch)
            return
        product = self.linear(x, w, between)
        options = self._launch.options()
        if out.rows is None:
            grid = (rows, triton.cdiv(inner, _SILU_BLOCK))
            norms.silu_mul[grid](between, out.values, inner, BLOCK=_SILU_BLOCK, num_warps=4, **options)
        else:
            block = pow2(inner)
            norms.silu_mul_scaled[(rows,)](
                *(*_product(product), *_stored(out)),
                **{"INNER": inner, "BLOCK": block, "num_warps": _SILU_WARPS if block >= 8192 else 4, **options},
            )

    def qkv(
        self,
        x: Scaled,
        w: Scaled,
        qkv: Tensor,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slot_map: Tensor,
        kv: KVCells,
        heads: Heads,
        eps: float,
    ) -> None:
        is_plain = bias is None and norms is None and x.rows is None and kv.scales is None
        if self._are_few(x.values) and is_plain and few.can_rotate(heads) and w.values.shape[1] > _ROTATE_HIDDEN:
            few.qkv_rope(x.values, w.values, qkv, rope, positions, slot_map, kv, heads, self._launch)
            return
        product = self.linear(x, w, qkv)
        group = _common_power(heads.num, heads.kv)
        q_norm, k_norm = norms or (qkv, qkv)
        grid = (qkv.shape[0], (heads.num + 2 * heads.kv) // group)
        factors = qkv if kv.scales is None else kv.scales.view(torch.bfloat16)  # [blocks, KVH, 2 BS]
        rope_write[grid](
            *(*_product(product), qkv if bias is None else bias, q_norm, k_norm, *rope, positions, slot_map),
            *(kv.keys, kv.values, factors, eps, kv.keys.stride(0), kv.keys.stride(1), factors.stride(0)),
            **{"H": heads.num, "KVH": heads.kv, "D": heads.dim, "HALF": pow2(heads.dim // 2), "HG": group},
            **{"BS": heads.block_size, "HAS_BIAS": bias is not None, "HAS_NORM": norms is not None},
            **{"IN": x.rows is not None, "SCALED": kv.scales is not None},
            num_warps=2 if group > 1 else 1,
            **self._launch.options(),
        )

    def decode_attention(
        self, qkv: Tensor, kv: KVCells, tables: Tensor, work: DecodeWork, layer: int, out: Tensor, heads: Heads
    ) -> None:
        # Programs beyond the items would only be in the way of the next kernel.
        grid = (min(self.attention_programs(heads), qkv.shape[0] * heads.kv * _PROGRAMS_PER_ROW),)
        attention.decode[grid](
            *(qkv, *_cells(kv), tables, work.items, work.num_items, work.turns[layer], out),
            *(work.part_acc, work.part_max, work.part_sum, work.done),
            *(attention.LOG2_E * heads.dim**-0.5, *_strides(kv), tables.stride(0), qkv.stride(0)),
            **self._attention(heads, kv),
            **{"GM": (group := pow2(heads.num // heads.kv)), "GP": max(_GROUP, group), "num_warps": 1},
            STAGES=_STAGES if kv.scales is None else _STAGES_SCALED,
            **self._launch.options(),
        )

    def prefill_attention(
        self, qkv: Tensor, kv: KVCells, tables: Tensor, packet: Tensor, work: DecodeWork, out: Tensor, heads: Heads
    ) -> None:
        attention.prefill[(self.prefill_programs(heads),)](
            *(qkv, *_cells(kv), tables, packet, int(Header.ITEMS), int(Header.NUM_ITEMS), out),
            *(work.part_acc, work.part_max, work.part_sum, work.done),
            *(attention.LOG2_E * heads.dim**-0.5, *_strides(kv), tables.stride(0), qkv.stride(0)),
            **self._attention(heads, kv),
            **{"MQ": attention.MAX_ROWS, "RG": _MERGED_ROWS, "STAGES": 3, "num_warps": attention.MAX_ROWS // 16},
            STRADDLES=not attention.is_aligned(attention.MAX_ROWS * heads.kv // heads.num),
            maxnreg=_PREFILL_REGISTERS if heads.dim <= 64 and kv.scales is None else None,
            **self._launch.options(),
        )

    def _are_few(self, x: Tensor) -> bool:
        return x.shape[0] <= few.MAX_ROWS and x.dtype != torch.float32 and x.is_cuda

    def _library_rows(self, x: Tensor, w: Tensor, out: Tensor) -> int | None:
        """The least number of rows, not less than those of x, that the library adds up in the order of `few`.

        None if there is none within reach. A product of 448 rows of 4,096 is such a case, and one of 480 rows takes
        three quarters of what `few` would.
        """
        room = min(_room(x), _room(out))
        for more in range(0, _MORE_ROWS + 1, _ROW_STEP):
            num = x.shape[0] + more
            if num <= room and self._is_library_exact(num, x.dtype, w):
                return num
        return None

    def _is_library_exact(self, rows: int, dtype: torch.dtype, w: Tensor) -> bool:
        """Whether the library adds up this shape in the order of `few`; tried out once, before it is recorded.

        With splits off it does for the matrices of large models; for small ones it slices K among warps now and then.
        """
        if not w.is_cuda:
            return True
        key = (rows, w.shape, w.dtype)
        if key not in self._is_exact:
            kind = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
            probe = torch.randn((rows, w.shape[1]), dtype=kind, device=w.device)
            places = torch.arange(_PROBES, device=w.device) * (rows - 1) // (_PROBES - 1)
            whole, part = (torch.empty((n, w.shape[0]), dtype=kind, device=w.device) for n in (rows, _PROBES))
            products.product(probe.to(dtype), w, whole)
            few.product(probe[places].to(dtype), w, part, self._launch)
            if is_trying():
                return True
            self._is_exact[key] = torch.equal(part, whole[places])
        return self._is_exact[key]

    def _attention(self, heads: Heads, kv: KVCells) -> dict[str, object]:
        return {
            "G": heads.num // heads.kv,
            "KVH": heads.kv,
            "D": heads.dim,
            "DP": pow2(heads.dim),
            "BS": heads.block_size,
            "TN": attention.TILE,
            "SCALED": 0 if kv.scales is None else 2 if kv.keys.dtype == torch.uint8 and kv.keys.is_cuda else 1,
            "PRECISION": "ieee",  # of float32 operands: no TF32
        }

    def _row(self, hidden: int) -> dict[str, object]:
        block = pow2(hidden)
        options = self._launch.options(AT_START)  # products: their programs find room beside a norm's
        return {"H": hidden, "BLOCK": block, "num_warps": 8 if block >= 4096 else 4, **options}


def _room(lines: Tensor) -> int:
    """Rows that there is memory for: what is computed with are the first rows of larger buffers."""
    left = lines.untyped_storage().nbytes() // lines.itemsize - lines.storage_offset()
    return left // lines.stride(0)


def _lengthened(lines: Tensor, num: int) -> Tensor:
    """The same memory with more rows; what is computed in them is never read."""
    return lines if num == lines.shape[0] else lines.as_strided((num, lines.shape[1]), lines.stride())


def _stored(out: Scaled) -> tuple[Tensor, Tensor]:
    """Where rows and their factors go; a kernel that stores no factors gets something in their place."""
    return out.values, out.values if out.rows is None else out.rows


def _product(y: Scaled) -> tuple[Tensor, Tensor, Tensor]:
    if y.rows is None or y.columns is None:
        return y.values, y.values, y.values
    return y.values, y.rows, y.columns


def _cells(kv: KVCells) -> tuple[Tensor, Tensor, Tensor]:
    return kv.keys, kv.values, kv.keys if kv.scales is None else kv.scales


def _strides(kv: KVCells) -> tuple[int, int, int]:
    """Of blocks, of cells, of blocks of factors."""
    return kv.keys.stride(0), kv.keys.stride(1), 0 if kv.scales is None else kv.scales.stride(0)


def _common_power(a: int, b: int) -> int:
    """The largest power of two up to 8 that divides both."""
    return next(power for power in (8, 4, 2, 1) if a % power == 0 and b % power == 0)
