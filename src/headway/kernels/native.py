"""The compiled CPU kernels of the distribution `headway-llm-kernels`, as a `KernelSet`.

Here are the operations that walk rows; matrices are in `native_linear`, the KV memory in `native_kv`, the library
itself in `library`. Knows no model.

Bits: a row's result does not depend on other rows, its place among them or the number of threads. The levels from avx2
on give equal bits; generic gives its own on machines without fused multiply-add.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.errors import ConfigError
from headway.fingerprint import file_digest
from headway.kernels.checks import (
    Array,
    address,
    as_rows,
    expect,
    in_range,
    is_flat,
    is_heads,
    is_index,
    is_rows,
    stride,
)
from headway.kernels.library import ACTIVATION_CODES, LEVELS, Context, find_library, open_library
from headway.kernels.low_rank import LowRank
from headway.kernels.native_kv import NativeKV
from headway.kernels.native_linear import NativeLinear
from headway.kernels.ops import KernelSet
from headway.kernels.packings import PACKINGS


def load(threads: int, level: str = "auto", library: Path | None = None, dtype: str = "float32") -> KernelSet | None:
    """The native kernels on `threads` threads, or None where the library is not installed.

    `level` forces an instruction level of LEVELS (for tests); `library` names a library outside site-packages; `dtype`
    is that of the matrices.
    """
    if dtype not in PACKINGS:
        raise ConfigError(f"kernel dtype is {dtype!r}; allowed are {', '.join(PACKINGS)}")
    if level != "auto" and level not in LEVELS:
        raise ConfigError(f"kernel level is {level!r}; allowed are auto, {', '.join(LEVELS)}")
    if threads < 1:
        raise ConfigError(f"kernel threads is {threads}; it must be at least 1")
    path = library or find_library()
    if path is None:
        return None
    digest, lib = file_digest(path), open_library(path)
    best = LEVELS[lib.hwk_best_level()]
    chosen = best if level == "auto" else level
    handle = lib.hwk_create(threads, LEVELS.index(chosen))
    if not handle:
        raise ConfigError(f"cannot run kernels at level {chosen} on {threads} threads; this machine offers {best}")
    context, packing = Context(lib, handle), PACKINGS[dtype]
    rows, linear, kv = NativeRows(context), NativeLinear(context, packing), NativeKV(context)
    return KernelSet(
        name=f"native-{chosen}",
        layout=packing.layout,
        pack=packing.pack,
        embed=linear.embed,
        linear=linear.linear,
        rms_norm=rows.rms_norm,
        rope=rows.rope,
        write_kv=kv.write_kv,
        attention=kv.attention,
        silu_mul=rows.silu_mul,
        gelu_mul=rows.gelu_mul,
        soft_cap=rows.soft_cap,
        layer_norm=rows.layer_norm,
        gelu=rows.gelu,
        adapt=rows.adapt,
        digest=digest,
        native=context,
        pack_table=packing.pack_table,
        pack_groups=packing.pack_groups,
        pack_bytes=packing.pack_bytes,
    )


class NativeRows:
    """Operations that walk one row after the other."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._call = context.call

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """See KernelSet.rms_norm."""
        n = x.shape[-1]
        expect(is_flat(weight) and weight.shape == (n,), "rms_norm", "weight", weight, f"float32 [{n}]")
        outer, inner, distance = as_rows(x)
        y = np.empty(x.shape, np.float32)
        self._call["rms_norm"](address(x), outer, inner, n, distance, address(weight), eps, address(y))
        return y

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """See KernelSet.layer_norm."""
        rows, n = x.shape
        expect(is_rows(x), "layer_norm", "x", x, "float32 [T, n] with contiguous rows")
        for name, vector in (("weight", weight), ("bias", bias)):
            expect(is_flat(vector) and vector.shape == (n,), "layer_norm", name, vector, f"float32 [{n}]")
        y = np.empty((rows, n), np.float32)
        self._call["layer_norm"](address(x), rows, n, stride(x), address(weight), address(bias), eps, address(y))
        return y

    def rope(self, q: Array, k: Array, positions: Array, cos: Array, sin: Array) -> None:
        """See KernelSet.rope; in place."""
        rows, q_heads, dim = q.shape
        expect(is_heads(q) and dim % 2 == 0, "rope", "q", q, "float32 [T, H, even D]")
        expect(is_heads(k) and k.shape[::2] == (rows, dim), "rope", "k", k, f"float32 [{rows}, KVH, {dim}]")
        expect(is_index(positions, np.int64, rows), "rope", "positions", positions, f"int64 [{rows}]")
        length, half = cos.shape
        for name, table in (("cos", cos), ("sin", sin)):
            fits = is_flat(table) and table.shape == (length, half) and half <= dim // 2
            expect(fits, "rope", name, table, f"float32 [{length}, up to {dim // 2}]")
        status = self._call["rope"](
            *(address(q), stride(q), q_heads, address(k), stride(k), k.shape[1], dim, 2 * half),
            *(address(positions), rows, address(cos), address(sin), length),
        )
        in_range(status, "rope", f"a position is outside 0..{length - 1}")

    def silu_mul(self, gate_up: Array) -> Array:
        """See KernelSet.silu_mul."""
        return self._gate_mul(gate_up, "silu")

    def gelu_mul(self, gate_up: Array) -> Array:
        """See KernelSet.gelu_mul."""
        return self._gate_mul(gate_up, "gelu_tanh")

    def gelu(self, x: Array) -> Array:
        """See KernelSet.gelu."""
        expect(is_flat(x), "gelu", "x", x, "contiguous float32")
        y = np.empty(x.shape, np.float32)
        self._call["gelu"](address(x), x.size, address(y))
        return y

    def soft_cap(self, x: Array, cap: float) -> Array:
        """See KernelSet.soft_cap."""
        expect(is_flat(x), "soft_cap", "x", x, "contiguous float32")
        y = np.empty(x.shape, np.float32)
        self._call["soft_cap"](address(x), x.size, cap, address(y))
        return y

    def adapt(self, x: Array, w: LowRank, y: Array) -> None:
        """See KernelSet.adapt; in place."""
        fits = is_rows(x) and x.shape[1] == w.num_in
        expect(fits, "adapt", "x", x, f"float32 [T, {w.num_in}] with contiguous rows")
        fits = is_rows(y) and y.shape == (len(x), w.num_out)
        expect(fits, "adapt", "y", y, f"float32 [{len(x)}, {w.num_out}] with contiguous rows")
        of_x = address(x), len(x), w.num_in, stride(x)
        self._call["adapt"](*of_x, *w.words, w.num_out, address(y), stride(y))

    def _gate_mul(self, gate_up: Array, activation: str) -> Array:
        rows, double = gate_up.shape
        expect(is_rows(gate_up) and double % 2 == 0, "gate_mul", "gate_up", gate_up, "float32 [T, 2 I]")
        y, code = np.empty((rows, double // 2), np.float32), ACTIVATION_CODES[activation]
        self._call["gate_mul"](address(gate_up), rows, double // 2, stride(gate_up), code, address(y))
        return y

    def exp(self, x: Array) -> Array:
        """The exponential the other kernels use, elementwise; here to be tested."""
        expect(is_flat(x), "exp", "x", x, "contiguous float32")
        y = np.empty(x.shape, np.float32)
        self._call["exp"](address(x), x.size, address(y))
        return y
