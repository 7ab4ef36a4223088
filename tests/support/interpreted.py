"""Triton's interpreter, made fit for tests: quick enough, at peace with numpy 2.4, and no other process's affair."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

from headway.runner.cuda import graphs


def _set_up() -> None:
    """From now on kernels are interpreted in this process. TRITON_INTERPRET was 1 when Triton was imported."""
    del os.environ["TRITON_INTERPRET"]  # not for processes that other tests start
    knobs.runtime.interpret = True
    _patch_for_good()
    builder = interpreter.interpreter_builder
    # Every sum of integers would be made a second time with more bits, to see whether it overflows.
    builder.options = replace(builder.options, sanitize_overflow=False)
    # A step interprets each of its padding tokens.
    graphs._MIXED = (8, 24, *graphs._MIXED)


def _patch_for_good() -> None:
    """The interpreter changes Triton's language at every call of every function: half of its time."""
    patched: set[object] = set()
    seen: set[object] = set()
    nothing = interpreter._LangPatchScope()  # to restore
    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang

    def with_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes an int of an array of one element, which numpy does no longer do from 2.4 on."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def once(fn: Any) -> Any:
        if fn not in seen:
            seen.add(fn)
            wanted = {value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)}
            if not wanted <= patched:
                patch_lang(fn)
                patched.update(wanted)
        return nothing

    interpreter._patch_lang_tensor = with_index
    interpreter._patch_lang = once


_set_up()
