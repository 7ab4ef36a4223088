"""Adapters as decoders take them: for each layer, what is added to which columns of which product.

Rows of one step may have different adapters or none; what a row gets depends on its own alone. Nothing here knows
requests, names or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.kernels.checks import Array
from headway.kernels.low_rank import LowRank
from headway.kernels.ops import KernelSet
from headway.models.spec import ModelSpec

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What an adapter may change in a layer, in the order of `Adapted` in decoder.h."""
_PRODUCTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj")}
_PRODUCTS["down"] = ("down_proj",)
_LINE = 64  # bytes of a cache line


class ModuleShape(NamedTuple):
    num_in: int
    num_out: int
    start: int  # its first column within the product of all that read the same input


def module_shapes(spec: ModelSpec) -> dict[str, ModuleShape]:
    """Of each module that a layer of this model has as one matrix: with experts, those of attention alone."""
    hidden, q, kv, inner = spec.hidden, spec.q_size, spec.kv_size, spec.intermediate
    shapes = {
        "q_proj": ModuleShape(hidden, q, 0),
        "k_proj": ModuleShape(hidden, kv, q),
        "v_proj": ModuleShape(hidden, kv, q + kv),
        "o_proj": ModuleShape(q, hidden, 0),
    }
    if not spec.experts:
        shapes["gate_proj"] = ModuleShape(hidden, inner, 0)
        shapes["up_proj"] = ModuleShape(hidden, inner, inner)
        shapes["down_proj"] = ModuleShape(inner, hidden, 0)
    return shapes


@dataclass(frozen=True, eq=False)
class Adapter:
    """`layers[i]` has the matrices of layer i by module; a module that is not there is as in the model itself."""

    layers: Sequence[dict[str, LowRank]]
    words: NDArray[np.int64] = field(init=False)  # as `AdaptedPart` of decoder.h: [layers, modules, 5]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _in_one_piece(self.layers))
        words = np.zeros((len(self.layers), len(MODULES), 5), np.int64)
        for at, layer in enumerate(self.layers):
            for name, w in layer.items():
                words[at, MODULES.index(name)] = w.words
        object.__setattr__(self, "words", words)

    @property
    def num_bytes(self) -> int:
        return sum(w.num_bytes for layer in self.layers for w in layer.values())


def _in_one_piece(layers: Sequence[dict[str, LowRank]]) -> list[dict[str, LowRank]]:
    """The same matrices, one behind the other in the order in which a step reads them: what is asked for ahead at the
    end of one is the beginning of the next, and the system gives so much memory in large pages."""
    ordered = [(at, name, layer[name]) for at, layer in enumerate(layers) for name in MODULES if name in layer]
    arena = np.zeros(sum(_lines(w) for _, _, w in ordered) + _LINE, np.uint8)
    end = -arena.ctypes.data % _LINE
    placed: list[dict[str, LowRank]] = [{} for _ in layers]
    for at, name, w in ordered:
        parts = []
        for part in (w.shrink, w.expand, w.scales):
            home = arena[end : end + part.nbytes].view(part.dtype).reshape(part.shape)
            home[...] = part
            parts.append(home)
            end += -(-part.nbytes // _LINE) * _LINE
        placed[at][name] = replace(w, shrink=parts[0], expand=parts[1], scales=parts[2])
    return placed


def _lines(w: LowRank) -> int:
    return sum(-(-part.nbytes // _LINE) * _LINE for part in (w.shrink, w.expand, w.scales))


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step: `of` [T] int32 is each token's place in `table`, -1 for none."""

    of: NDArray[np.int32]
    table: tuple[Adapter, ...]

    def add(self, ops: KernelSet, spec: ModelSpec, layer: int, product: str, x: Array, y: Array) -> None:
        """What each row's adapter adds to a product of x, in place."""
        assert ops.adapt is not None, "adapters are refused where the kernels run none"
        shapes = module_shapes(spec)
        for adapter, rows in self._by_adapter():
            for name in _PRODUCTS[product]:
                w = adapter.layers[layer].get(name)
                if w is not None:
                    columns = slice(shapes[name].start, shapes[name].start + w.num_out)
                    part = np.ascontiguousarray(y[rows, columns])
                    ops.adapt(x[rows], w, part)
                    y[rows, columns] = part

    def _by_adapter(self) -> Iterator[tuple[Adapter, NDArray[np.int64]]]:
        for number, adapter in enumerate(self.table):
            rows = np.nonzero(self.of == number)[0]
            if len(rows):
                yield adapter, rows
