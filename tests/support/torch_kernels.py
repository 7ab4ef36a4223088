"""A kernel set of arrays as one of tensors over the same memory: many tests know what is right by torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.kv_format import KVFormat
from headway.kernels.ops import KernelSet


class _Rows:
    def __init__(self, rows: object) -> None:
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return arrays(getattr(self._rows, name))


def arrays(value: Any) -> Any:
    """Tensors as arrays, and so the tensors of what says which rows attend to what."""
    if isinstance(value, Tensor):
        return value.numpy()
    if hasattr(value, "block_size"):
        return _Rows(value)
    return value


def on_tensors(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of arrays as one of tensors."""

    @functools.wraps(operation, updated=())
    def run(*arguments: Any) -> Any:
        result = operation(*map(arrays, arguments))
        if isinstance(result, tuple):
            return tuple(None if each is None else torch.from_numpy(each) for each in result)
        return torch.from_numpy(result) if isinstance(result, np.ndarray) else result

    return run


class Tensors:
    """A module of functions of arrays, each as one of tensors."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return on_tensors(value) if callable(value) else value


def of_tensors(kernels: KernelSet) -> KernelSet:
    """The set, whose every operation takes and gives tensors."""
    names = [field.name for field in dataclasses.fields(kernels) if callable(getattr(kernels, field.name))]
    return dataclasses.replace(kernels, **{name: on_tensors(getattr(kernels, name)) for name in names})


def dtype_of(kind: KVFormat) -> torch.dtype:
    """The dtype of tensors that hold records of this format."""
    return torch.from_numpy(np.empty(0, kind.dtype)).dtype
