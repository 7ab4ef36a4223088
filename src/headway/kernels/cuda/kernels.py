"""`TritonKernels`: the operations of `ops` as Triton launches, with the tile shapes that measurement chose.

It owns launch shapes alone: what is computed stands in the files it imports.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from headway.kernels.cuda import attention, few, norms, products
from headway.kernels.cuda.launch import Launch, pow2
from headway.kernels.cuda.layout import Header
from headway.kernels.cuda.ops import DecodeWork, Heads
from headway.kernels.cuda.rope import rope_write

_GROUP = 16  # the tensor cores' least number of rows: a group of query heads is padded to it
_SILU_BLOCK = 2048
_PROGRAMS_LARGE = 8  # of decode attention per multiprocessor: as many as its registers hold
_PROGRAMS_SMALL = 12
_ROTATE_HIDDEN = 2048  # above, rotating within the product of qkv is faster than after it
_PROBES = 16  # rows by which a library's product is compared


class TritonKernels:
    """Tile shapes depend on the model's sizes alone, never on the number of rows where that would change bits."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._is_exact: dict[tuple[int, int, int], bool] = {}  # (rows, outputs, inner) -> the library has our bits

    def attention_programs(self, heads: Heads) -> int:
        return self._launch.num_sms * (_PROGRAMS_LARGE if heads.dim > 64 else _PROGRAMS_SMALL)

    def embed_norm(
        self, tokens: Tensor, table: Tensor, weight: Tensor, residual: Tensor, out: Tensor, eps: float
    ) -> None:
        hidden = table.shape[1]
        norms.embed_norm[(out.shape[0],)](tokens, table, weight, residual, out, eps, **self._row(hidden))

    def add_norm(self, y: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
        norms.add_norm[(out.shape[0],)](y, residual, weight, out, eps, **self._row(out.shape[1]))

    def gather_norm(
        self, y: Tensor, residual: Tensor, weight: Tensor, sampled: Tensor, out: Tensor, eps: float
    ) -> None:
        norms.gather_norm[(out.shape[0],)](y, residual, weight, sampled, out, eps, **self._row(out.shape[1]))

    def linear(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        if self._are_few(x) or not self._is_library_exact(x, w):
            few.product(x, w, out, self._launch)
        else:
            products.product(x, w, out)

    def gate_up(self, x: Tensor, w: Tensor, between: Tensor, out: Tensor) -> None:
        if self._are_few(x):
            few.gate_up_silu(x, w, out, self._launch)
            return
        self.linear(x, w, between)
        rows, inner = out.shape
        grid = (rows, triton.cdiv(inner, _SILU_BLOCK))
        norms.silu_mul[grid](between, out, inner, BLOCK=_SILU_BLOCK, num_warps=4, **self._launch.options())

    def qkv(
        self,
        x: Tensor,
        w: Tensor,
        qkv: Tensor,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slot_map: Tensor,
        kv: Tensor,
        heads: Heads,
        eps: float,
    ) -> None:
        is_plain = bias is None and norms is None
        if self._are_few(x) and is_plain and few.can_rotate(heads) and x.shape[1] > _ROTATE_HIDDEN:
            few.qkv_rope(x, w, qkv, rope, positions, slot_map, kv, heads, self._launch)
            return
        self.linear(x, w, qkv)
        group = _common_power(heads.num, heads.kv)
        q_norm, k_norm = norms or (qkv, qkv)
        grid = (qkv.shape[0], (heads.num + 2 * heads.kv) // group)
        rope_write[grid](
            *(qkv, qkv if bias is None else bias, q_norm, k_norm, *rope, positions, slot_map, kv[0], kv[1], eps),
            *(kv.stride(1), kv.stride(2)),
            **{"H": heads.num, "KVH": heads.kv, "D": heads.dim, "HALF": pow2(heads.dim // 2), "HG": group},
            **{"BS": heads.block_size, "HAS_BIAS": bias is not None, "HAS_NORM": norms is not None},
            num_warps=2 if group > 1 else 1,
            **self._launch.options(),
        )

    def decode_attention(
        self, qkv: Tensor, kv: Tensor, tables: Tensor, work: DecodeWork, layer: int, out: Tensor, heads: Heads
    ) -> None:
        # Programs beyond the items would only be in the way of the next kernel.
        grid = (min(self.attention_programs(heads), qkv.shape[0] * heads.kv * 8),)
        attention.decode[grid](
            *(qkv, kv[0], kv[1], tables, work.items, work.num_items, work.turns[layer], out),
            *(work.part_acc, work.part_max, work.part_sum, work.done),
            *(attention.LOG2_E * heads.dim**-0.5, kv.stride(1), kv.stride(2), tables.stride(0), qkv.stride(0)),
            **self._attention(heads),
            **{"GP": _GROUP, "STAGES": 5},
            num_warps=1,
            **self._launch.options(),
        )

    def prefill_attention(
        self, qkv: Tensor, kv: Tensor, tables: Tensor, packet: Tensor, out: Tensor, heads: Heads
    ) -> None:
        attention.prefill[(2 * self._launch.num_sms,)](
            *(qkv, kv[0], kv[1], tables, packet, int(Header.ITEMS), int(Header.NUM_ITEMS), out),
            *(attention.LOG2_E * heads.dim**-0.5, kv.stride(1), kv.stride(2), tables.stride(0), qkv.stride(0)),
            **self._attention(heads),
            **{"MQ": attention.MAX_ROWS, "STAGES": 3},
            num_warps=8,
            **self._launch.options(),
        )

    def _are_few(self, x: Tensor) -> bool:
        return x.shape[0] <= few.MAX_ROWS and x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda

    def _is_library_exact(self, x: Tensor, w: Tensor) -> bool:
        """Whether the library adds up this shape in the order of `few`; tried out once, before it is recorded.

        With splits off it does for the matrices of large models; for small ones it slices K among warps now and then.
        """
        rows, (num_out, inner) = x.shape[0], w.shape
        if not x.is_cuda or x.dtype == torch.float32:
            return True
        if (rows, num_out, inner) not in self._is_exact:
            probe = torch.randn((rows, inner), dtype=x.dtype, device=x.device)
            whole = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
            products.product(probe, w, whole)
            places = torch.arange(_PROBES, device=x.device) * (rows - 1) // (_PROBES - 1)
            part = torch.empty((_PROBES, num_out), dtype=x.dtype, device=x.device)
            few.product(probe[places].contiguous(), w, part, self._launch)
            self._is_exact[rows, num_out, inner] = torch.equal(part, whole[places])
        return self._is_exact[rows, num_out, inner]

    def _attention(self, heads: Heads) -> dict[str, object]:
        return {
            "G": heads.num // heads.kv,
            "KVH": heads.kv,
            "D": heads.dim,
            "DP": pow2(heads.dim),
            "BS": heads.block_size,
            "TN": attention.TILE,
            "PRECISION": "ieee",  # of float32 operands: no TF32
        }

    def _row(self, hidden: int) -> dict[str, object]:
        block = pow2(hidden)
        return {"H": hidden, "BLOCK": block, "num_warps": 8 if block >= 4096 else 4, **self._launch.options()}


def _common_power(a: int, b: int) -> int:
    """The largest power of two up to 8 that divides both."""
    return next(power for power in (8, 4, 2, 1) if a % power == 0 and b % power == 0)
