"""Kernels compiled before their first launch, all at the same time.

A cold start compiles some twenty kernels, one after the other at their first launches, each with a C compiler's run for
its launcher: ten seconds. Here a launch is tried out first, which notes what is not compiled yet and launches none of
it; then threads compile what was noted. Nothing of this exists where Triton interprets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

_WORKERS = 16


def is_trying() -> bool:
    """Whether launches are only noted: results of kernels mean nothing then."""
    return knobs.runtime.jit_cache_hook is not None


def compile_all(trial: Callable[[], object]) -> int:
    """Compile every kernel that `trial` launches; how many there were. Nothing else may launch meanwhile."""
    noted: dict[str, tuple[JITFunction[object], str]] = {}

    def note(*, key: str, fn: object, compile: dict[str, object], **_: object) -> bool:
        function: JITFunction[object] = fn.jit_function  # type: ignore[attr-defined]
        noted[f"{function.module}.{function.__name__}:{key}"] = (function, str(compile["specialization_data"]))
        return True

    with ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1)) as pool:
        key = pool.submit(triton_key)  # of Triton's own files, 0.4 s; needed below, and kept
        knobs.runtime.jit_cache_hook = note
        try:
            trial()
        finally:
            knobs.runtime.jit_cache_hook = None
        # Hashes on which the disk cache rests: threads that compute them at the same time get different ones.
        key.result()
        for function, _ in noted.values():
            _ = function.cache_key
        for _ in pool.map(_compile, noted.values()):
            pass
    return len(noted)


def _compile(wanted: tuple[JITFunction[object], str]) -> None:
    function, specialization = wanted
    try:
        kernel = function.preload(specialization)
        _ = kernel.run  # makes the launcher and loads the binary
    except Exception:  # the first launch will compile it, and say what is wrong
        log.exception("%s could not be compiled ahead", function.__name__)
