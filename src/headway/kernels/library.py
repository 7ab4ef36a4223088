"""The shared library of the distribution `headway-llm-kernels`: where it lies, its C signatures, and one context of it.

Knows what the C interface looks like and no tensor: every check of what is passed is made by the callers.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from headway.errors import ConfigError

LEVELS = ("generic", "avx2", "avx512", "avx512vnni")
ABI = 8
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "quantize": (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p),
    "gemm": (
        *(c_void_p, *(c_int64,) * 3),  # x, T, in, its stride
        *(c_void_p, c_int32, c_int64, c_int64),  # w, its format, bytes and out
        *(c_void_p, c_void_p),  # bias or null, result
    ),
    "embed": (c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "rms_norm": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p),
    "layer_norm": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p),
    "rope": (*(c_void_p, c_int64, c_int64) * 2, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
    "write_kv": (*(c_void_p, c_int64) * 2, *(c_int64,) * 3, c_void_p, c_int32, c_int64, c_void_p),
    "gate_mul": (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p),
    "gelu": (c_void_p, c_int64, c_void_p),
    "soft_cap": (c_void_p, c_int64, c_float, c_void_p),
    "attention": (
        *(c_void_p, *(c_int64,) * 5),  # q, its stride, T, H, KVH, D
        *(c_void_p, c_int32, c_int64, c_int64),  # kv, its format, num_blocks, block_size
        *(c_void_p, c_int64, c_int64),  # tables, R, W
        *(c_void_p, c_void_p, c_float, c_int64, c_float, c_void_p),  # row_of, positions, scale, window, cap, out
    ),
    "adapt": (
        *(c_void_p, *(c_int64,) * 3),  # x, T, in, its stride
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int32),  # shrink, expand, scales, rank, format
        *(c_int64, c_void_p, c_int64),  # out, y, its stride
    ),
    "exp": (c_void_p, c_int64, c_void_p),
}
_DECODER_CREATE = (c_void_p,) * 4  # context, sizes, factors, weights
_DECODER_FORWARD = (
    *(c_void_p, *(c_void_p,) * 4, c_int64),  # decoder; tokens, positions, slots, row_of, T
    *(c_void_p, c_int64, c_int64),  # tables, R, W
    *(c_void_p, c_int64),  # sample_index, S
    *(c_void_p, c_int32, c_int64, c_int64),  # kv, its format, num_blocks, block_size
    *(c_void_p, c_void_p),  # logits or null, best or null
    *(c_void_p, c_int64, c_void_p),  # allowed or null, its lines, line_of
    *(c_void_p, c_void_p, c_int64),  # adapter_of or null, addresses of adapters, how many
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
    return "none" if path is None else LEVELS[open_library(path).hwk_best_level()]


def chosen_level(kernels: str) -> str:
    """The level that this choice of kernels comes to here; "none" where plain torch computes."""
    if kernels == "ref":
        return "none"
    level, forced = cpu_level(), kernels.removeprefix("native-")
    return forced if level != "none" and forced in LEVELS else level


class Context:
    """The library's threads and its level for one owner. It lives as long as any kernel that holds it."""

    def __init__(self, lib: ctypes.CDLL, handle: int) -> None:
        self.call: dict[str, Callable[..., int]] = {
            name: functools.partial(getattr(lib, f"hwk_{name}"), handle) for name in _SIGNATURES
        }
        self._lib, self._handle = lib, handle
        # Not at exit: the workers sleep then, and joining them could only delay the end.
        weakref.finalize(self, lib.hwk_destroy, handle).atexit = False

    def make_decoder(self, *arguments: int | float) -> NativeModel | None:
        """What hwk_decoder_create makes of its arguments after the first; None where it refuses the weights."""
        handle = self._lib.hwk_decoder_create(self._handle, *arguments)
        return NativeModel(self, self._lib, handle) if handle else None


class NativeModel:
    """A decoder inside the library; it holds the context it runs on."""

    def __init__(self, context: Context, lib: ctypes.CDLL, handle: int) -> None:
        self._context = context
        self.forward: Callable[..., int] = functools.partial(lib.hwk_decoder_forward, handle)
        weakref.finalize(self, lib.hwk_decoder_destroy, handle).atexit = False


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions; refuses one of another interface."""
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
    lib.hwk_decoder_create.argtypes = _DECODER_CREATE
    lib.hwk_decoder_create.restype = c_void_p
    lib.hwk_decoder_forward.argtypes = _DECODER_FORWARD
    lib.hwk_decoder_forward.restype = c_int
    lib.hwk_decoder_destroy.argtypes = (c_void_p,)
    lib.hwk_decoder_destroy.restype = None
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, f"hwk_{name}")
        function.argtypes = (c_void_p, *arguments)
        function.restype = c_int
    return lib
