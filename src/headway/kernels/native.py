"""The compiled CPU kernels of the distribution `headway-kernels`, as a `KernelSet`.

Owns finding the shared library, its C signatures, and every check of dtype, shape and contiguity: past this file the
kernels trust what they are given, except for the indices inside tensors, which they check themselves. Knows no model.

Bits: a row's result never depends on its company, its place or the number of threads. The levels avx2 and avx512 give
equal bits; generic gives its own on machines without fused multiply-add.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from headway.errors import ConfigError, EngineError
from headway.kernels.ops import KernelSet, PagedRows

LAYOUT = "panel48-f32-1"
"""Weights as `pack` leaves them: the same bytes for every level, so one cache file serves every machine."""

LEVELS = ("generic", "avx2", "avx512")
PANEL = 48
ABI = 1

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "gemm": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
    "embed": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "rms_norm": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p),
    "rope": (*(c_void_p, c_int64, c_int64) * 2, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
    "write_kv": (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "silu_mul": (c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "attention": (
        *(c_void_p, *(c_int64,) * 5),  # q, its stride, T, H, KVH, D
        *(c_void_p, c_int64, c_int64),  # kv, num_blocks, block_size
        *(c_void_p, c_int64, c_int64),  # tables, R, W
        *(c_void_p, c_void_p, c_float, c_void_p),  # row_of, positions, scale, out
    ),
    "exp": (c_void_p, c_int64, c_void_p),
}


def load(threads: int, level: str = "auto", library: Path | None = None) -> KernelSet | None:
    """The native kernels on `threads` threads, or None where the library is not installed.

    `level` forces an instruction level of LEVELS (for tests); `library` names a library outside site-packages.
    """
    if level != "auto" and level not in LEVELS:
        raise ConfigError(f"kernel level is {level!r}; allowed are auto, {', '.join(LEVELS)}")
    if threads < 1:
        raise ConfigError(f"kernel threads is {threads}; it must be at least 1")
    path = library or find_library()
    if path is None:
        return None
    lib = _open(path)
    best = LEVELS[lib.hwk_best_level()]
    chosen = best if level == "auto" else level
    context = lib.hwk_create(threads, LEVELS.index(chosen))
    if not context:
        raise ConfigError(f"cannot run kernels at level {chosen} on {threads} threads; this machine offers {best}")
    native = Native(lib, context)
    return KernelSet(
        name=f"native-{chosen}",
        layout=LAYOUT,
        pack=pack,
        embed=native.embed,
        linear=native.linear,
        rms_norm=native.rms_norm,
        rope=native.rope,
        write_kv=native.write_kv,
        attention=native.attention,
        silu_mul=native.silu_mul,
    )


def find_library() -> Path | None:
    """Where the installed library lies, or None."""
    spec = importlib.util.find_spec("headway_kernels")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = Path(folder) / "libheadway_kernels.so"
        if path.is_file():
            return path
    return None


def cpu_level(library: Path | None = None) -> str:
    """The best level of LEVELS that library and machine share; "none" where the library is not installed."""
    path = library or find_library()
    return "none" if path is None else LEVELS[_open(path).hwk_best_level()]


def pack(w: Tensor) -> Tensor:
    """w [out, in] -> a tensor of the same shape and size whose memory is in panel order; only kernels can read it.

    Panels of 48 rows of w, the last one with what is left, each stored input by input:
    w[0..47, 0], w[0..47, 1], ..., w[0..47, in-1], w[48..95, 0], ...
    """
    _expect(w.dim() == 2 and w.dtype == torch.float32, "pack", "w", w, "float32 [out, in]")
    num_out, num_in = w.shape
    whole = num_out // PANEL * PANEL
    packed = torch.empty(num_out * num_in)
    head, tail = packed[: whole * num_in], packed[whole * num_in :]
    head.view(whole // PANEL, num_in, PANEL).copy_(w[:whole].view(whole // PANEL, PANEL, num_in).transpose(1, 2))
    tail.view(num_in, num_out - whole).copy_(w[whole:].t())
    return packed.view(num_out, num_in)


class Native:
    """One context of the library: its threads and its level. The context lives as long as any of its kernels."""

    def __init__(self, lib: ctypes.CDLL, context: int) -> None:
        self._call: dict[str, Callable[..., int]] = {
            name: functools.partial(getattr(lib, f"hwk_{name}"), context) for name in _SIGNATURES
        }
        # Not at exit: the workers sleep then, and joining them could only delay the end.
        weakref.finalize(self, lib.hwk_destroy, context).atexit = False

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """See KernelSet.linear; w is as `pack` leaves it."""
        rows, num_in = x.shape
        _expect(_is_rows(x), "linear", "x", x, "float32 [T, in] with contiguous rows")
        _expect(_is_flat(w) and w.shape == (out, num_in), "linear", "w", w, f"packed float32 [{out}, {num_in}]")
        if bias is not None:
            _expect(_is_flat(bias) and bias.shape == (out,), "linear", "bias", bias, f"float32 [{out}]")
        y = torch.empty(rows, out)
        bias_at = None if bias is None else bias.data_ptr()
        self._call["gemm"](x.data_ptr(), rows, num_in, x.stride(0), w.data_ptr(), out, bias_at, y.data_ptr())
        return y

    def embed(self, w: Tensor, tokens: Tensor) -> Tensor:
        """See KernelSet.embed; w is as `pack` leaves it."""
        _expect(_is_flat(w) and w.dim() == 2, "embed", "w", w, "packed float32 [out, in]")
        _expect(_is_index(tokens, torch.int64), "embed", "tokens", tokens, "contiguous int64 [T]")
        num_out, num_in = w.shape
        y = torch.empty(tokens.shape[0], num_in)
        status = self._call["embed"](w.data_ptr(), num_out, num_in, tokens.data_ptr(), tokens.shape[0], y.data_ptr())
        _in_range(status, "embed", f"a token is outside 0..{num_out - 1}")
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See KernelSet.rms_norm."""
        n = x.shape[-1]
        _expect(_is_flat(weight) and weight.shape == (n,), "rms_norm", "weight", weight, f"float32 [{n}]")
        outer, inner, stride = _as_rows(x)
        y = torch.empty(x.shape)
        self._call["rms_norm"](x.data_ptr(), outer, inner, n, stride, weight.data_ptr(), eps, y.data_ptr())
        return y

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See KernelSet.rope; in place."""
        rows, q_heads, dim = q.shape
        _expect(_is_heads(q) and dim % 2 == 0, "rope", "q", q, "float32 [T, H, even D]")
        _expect(_is_heads(k) and k.shape[::2] == (rows, dim), "rope", "k", k, f"float32 [{rows}, KVH, {dim}]")
        _expect(_is_index(positions, torch.int64, rows), "rope", "positions", positions, f"int64 [{rows}]")
        length = cos.shape[0]
        for name, table in (("cos", cos), ("sin", sin)):
            fits = _is_flat(table) and table.shape == (length, dim // 2)
            _expect(fits, "rope", name, table, f"float32 [{length}, {dim // 2}]")
        status = self._call["rope"](
            *(q.data_ptr(), q.stride(0), q_heads, k.data_ptr(), k.stride(0), k.shape[1], dim),
            *(positions.data_ptr(), rows, cos.data_ptr(), sin.data_ptr(), length),
        )
        _in_range(status, "rope", f"a position is outside 0..{length - 1}")

    def write_kv(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_map: Tensor) -> None:
        """See KernelSet.write_kv."""
        _expect(_is_flat(kv_layer) and kv_layer.dim() == 5, "write_kv", "kv_layer", kv_layer, "contiguous, 5 axes")
        _, num_blocks, block_size, kv_heads, dim = kv_layer.shape
        rows = k.shape[0]
        for name, new in (("k", k), ("v", v)):
            fits = _is_heads(new) and new.shape == (rows, kv_heads, dim)
            _expect(fits, "write_kv", name, new, f"float32 [{rows}, {kv_heads}, {dim}]")
        _expect(_is_index(slot_map, torch.int64, rows), "write_kv", "slot_map", slot_map, f"int64 [{rows}]")
        num_cells = num_blocks * block_size
        status = self._call["write_kv"](
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), rows, kv_heads * dim),
            *(kv_layer.data_ptr(), num_cells, slot_map.data_ptr()),
        )
        _in_range(status, "write_kv", f"a slot is outside 0..{num_cells - 1}")

    def attention(self, q: Tensor, kv_layer: Tensor, batch: PagedRows, scale: float) -> Tensor:
        """See KernelSet.attention."""
        rows, heads, dim = q.shape
        _expect(_is_flat(kv_layer) and kv_layer.dim() == 5, "attention", "kv_layer", kv_layer, "contiguous, 5 axes")
        _, num_blocks, block_size, kv_heads, cell = kv_layer.shape
        fits = cell == dim and heads % kv_heads == 0 and block_size == batch.block_size
        _expect(
            fits, "attention", "kv_layer", kv_layer, f"block size {batch.block_size}, D {dim}, KVH dividing {heads}"
        )
        _expect(_is_heads(q), "attention", "q", q, "float32 [T, H, D] with contiguous heads")
        tables, row_of, positions = batch.tables, batch.row_of, batch.positions
        fits = tables.dim() == 2 and tables.dtype == torch.int32 and tables.is_contiguous()
        _expect(fits, "attention", "tables", tables, "contiguous int32 [R, W]")
        _expect(_is_index(row_of, torch.int32, rows), "attention", "row_of", row_of, f"int32 [{rows}]")
        _expect(_is_index(positions, torch.int64, rows), "attention", "positions", positions, f"int64 [{rows}]")
        y = torch.empty(rows, heads, dim)
        status = self._call["attention"](
            *(q.data_ptr(), q.stride(0), rows, heads, kv_heads, dim, kv_layer.data_ptr(), num_blocks, block_size),
            *(tables.data_ptr(), tables.shape[0], tables.shape[1], row_of.data_ptr(), positions.data_ptr()),
            *(scale, y.data_ptr()),
        )
        _in_range(status, "attention", f"a row, position or block is outside its table or the {num_blocks} blocks")
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See KernelSet.silu_mul."""
        rows, double = gate_up.shape
        _expect(_is_rows(gate_up) and double % 2 == 0, "silu_mul", "gate_up", gate_up, "float32 [T, 2 I]")
        y = torch.empty(rows, double // 2)
        self._call["silu_mul"](gate_up.data_ptr(), rows, double // 2, gate_up.stride(0), y.data_ptr())
        return y

    def exp(self, x: Tensor) -> Tensor:
        """The exponential the other kernels use, elementwise; here to be tested."""
        _expect(_is_flat(x), "exp", "x", x, "contiguous float32")
        y = torch.empty(x.shape)
        self._call["exp"](x.data_ptr(), x.numel(), y.data_ptr())
        return y


def _open(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
        abi = lib.hwk_abi()
    except (OSError, AttributeError) as fault:
        raise ConfigError(
            f"cannot use the kernel library {path}: {fault}; build it again: scripts/build-kernels"
        ) from None
    if abi != ABI:
        raise ConfigError(f"kernel library {path} has interface {abi}; needed is {ABI}: run scripts/build-kernels")
    lib.hwk_create.argtypes = (c_int, c_int)
    lib.hwk_create.restype = c_void_p
    lib.hwk_destroy.argtypes = (c_void_p,)
    lib.hwk_destroy.restype = None
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, f"hwk_{name}")
        function.argtypes = (c_void_p, *arguments)
        function.restype = c_int
    return lib


def _expect(fits: bool, kernel: str, name: str, got: Tensor, wanted: str) -> None:
    if not fits:
        what = f"{got.dtype} {list(got.shape)} with strides {list(got.stride())} on {got.device}"
        raise EngineError(f"kernel {kernel}: {name} is {what}; needed is {wanted} in host memory")


def _in_range(status: int, kernel: str, fault: str) -> None:
    if status:
        raise EngineError(f"kernel {kernel}: {fault}")


def _is_flat(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.is_contiguous() and t.is_cpu


def _is_rows(t: Tensor) -> bool:
    """Float rows that are contiguous one by one, at any distance."""
    return t.dtype == torch.float32 and t.dim() == 2 and (t.stride(1) == 1 or t.shape[1] == 1) and t.is_cpu


def _is_heads(t: Tensor) -> bool:
    """[T, heads, D] whose last two axes are contiguous: perhaps a view into a fused row."""
    if t.dtype != torch.float32 or t.dim() != 3 or not t.is_cpu:
        return False
    return (t.stride(2) == 1 or t.shape[2] == 1) and (t.stride(1) == t.shape[2] or t.shape[1] == 1)


def _is_index(t: Tensor, dtype: torch.dtype, length: int | None = None) -> bool:
    return t.dtype == dtype and t.dim() == 1 and t.is_contiguous() and t.is_cpu and length in (None, t.shape[0])


def _as_rows(x: Tensor) -> tuple[int, int, int]:
    """x [..., n] as (outer, inner, stride of outer): outer rows at any distance, each of `inner` adjacent rows of n."""
    n = x.shape[-1]
    if _is_flat(x):
        return x.numel() // n, 1, n
    if x.dim() == 2:
        _expect(_is_rows(x), "rms_norm", "x", x, "float32 [T, n] with contiguous rows")
        return x.shape[0], 1, x.stride(0)
    _expect(_is_heads(x), "rms_norm", "x", x, "float32 [T, heads, n] with contiguous heads")
    return x.shape[0], x.shape[1], x.stride(0)
