"""Choosing a kernel set by name: the native one where it is installed, plain torch otherwise."""

from __future__ import annotations

import logging

from headway.errors import ConfigError
from headway.kernels import native, ref
from headway.kernels.ops import KernelSet

log = logging.getLogger(__name__)

NAMES = ("auto", "native", "ref")
HOW_TO_GET_NATIVE = "run scripts/build-kernels, or install headway-kernels on a machine with a C++ compiler"


def load(name: str, threads: int) -> KernelSet:
    """The named set on `threads` threads; `auto` prefers native and says so once where it has to do without."""
    if name not in NAMES:
        raise ConfigError(f"kernels is {name!r}; allowed: {', '.join(NAMES)}")
    if name == "ref":
        return ref.load()
    found = native.load(threads)
    if found is not None:
        return found
    if name == "native":
        raise ConfigError(f"the native kernels are not installed; {HOW_TO_GET_NATIVE}, or use kernels auto or ref")
    log.warning(
        "the native kernels are not installed; running the slower plain-torch ones. To get them, %s", HOW_TO_GET_NATIVE
    )
    return ref.load()
