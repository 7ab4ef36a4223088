"""Choosing a kernel set by name: the native one where it is installed, plain torch otherwise, or one from outside."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace

from headway import plugins
from headway.errors import ConfigError
from headway.extras import require_torch
from headway.kernels import native
from headway.kernels.library import LEVELS
from headway.kernels.ops import KernelSet

log = logging.getLogger(__name__)

X86 = ("x86_64", "AMD64")
_FORCED = {f"native-{level}": level for level in LEVELS}
NAMES = ("auto", "native", "ref", *_FORCED)
HOW_TO_GET_NATIVE = (
    "run scripts/build-kernels in a clone, or install headway-llm-kernels (scripts/build-wheels makes it)"
)


def load(name: str, threads: int, dtype: str = "float32") -> KernelSet:
    """The named set on `threads` threads for weights of this `dtype`; `native-avx2` and the like keep to one level.

    `auto` prefers native. Where it must take something slower it logs a warning and the set's `fallback` says why.
    """
    if ":" in name:
        return _outside(name, threads, dtype)
    if name not in NAMES:
        raise ConfigError(f"kernels is {name!r}; allowed: {', '.join(NAMES)}")
    if name == "ref":
        return _plain_torch("kernels = ref", threads, dtype)
    found = native.load(threads, _FORCED.get(name, "auto"), dtype=dtype)
    if found is None and name != "auto":
        raise ConfigError(f"the native kernels are not installed; {HOW_TO_GET_NATIVE}, or use kernels auto or ref")
    if found is None:
        missing = "the native kernels are not installed"
        found = _plain_torch(f"{missing}, and what computes without them", threads, dtype)
        log.warning("%s; running the slower plain-torch ones. To get them, %s", missing, HOW_TO_GET_NATIVE)
        return replace(found, fallback=missing)
    if found.name == "native-generic" and name not in _FORCED:
        machine = platform.machine()
        slow = "this processor has no AVX2" if machine in X86 else f"there are no vector kernels for {machine}"
        log.warning("%s; running the slower kernels of level generic", slow)
        return replace(found, fallback=slow)
    return found


def _outside(name: str, threads: int, dtype: str) -> KernelSet:
    """What `my.module:load` makes of the number of threads and the number format."""
    found = plugins.load("kernels", name)(threads, dtype)
    if not isinstance(found, KernelSet):
        raise ConfigError(f"kernels is {name!r}, which gives a {type(found).__name__}; allowed: a KernelSet")
    return found


def _plain_torch(what: str, threads: int, dtype: str) -> KernelSet:
    require_torch(what, instead=HOW_TO_GET_NATIVE)
    from headway.kernels import ref_quant  # imports torch, which the native kernels do without

    return ref_quant.load(dtype, threads)
