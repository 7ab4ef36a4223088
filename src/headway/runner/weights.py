"""A checkpoint's tensors become the packed form that is computed with, once; later starts read that form from disk.

    source ── name by name ──▶ fuse parts ──▶ kernels.pack ──▶ one file in the cache ──▶ memory ──▶ Weights

Each layout has a file of its own beside the others; `packed` says what it looks like. Nothing is ever held twice: the
conversion keeps a parameter only until it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.errors import ModelFormatError
from headway.kernels.checks import Array
from headway.kernels.ops import KernelSet
from headway.kernels.packings import is_blob
from headway.modelfile.groups import GROUP, Groups
from headway.models.params import ModelWeights, Parameter, Part
from headway.models.registry import parameters
from headway.models.shard import WHOLE, Shard, rows_of
from headway.models.spec import ModelSpec
from headway.runner.packed import read_packed, write_packed
from headway.runner.placing import place_tensors

FORMAT = "1"  # of the file this module writes; part of its key


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    @property
    def digest(self) -> str:
        """Identity of the content."""

    def tensors(self) -> Iterable[tuple[str, NDArray[np.float32]]]:
        """(checkpoint name, float32 array), one at a time."""

    def grouped(self) -> Iterable[tuple[str, NDArray[np.float32] | Groups]]:
        """The same, but a matrix that is stored in 4-bit groups comes as those."""


class EntryCache(Protocol):
    """Complete entries by key."""

    def entry(self, key: str) -> Path | None:
        """The entry, if it is there."""

    def publish(self, key: str, write: Callable[[Path], None]) -> Path:
        """The entry; if it is not there `write` makes it."""


def load_weights(
    source: TensorSource, spec: ModelSpec, cache: EntryCache, kernels: KernelSet, shard: Shard = WHOLE
) -> ModelWeights[Array]:
    """The model's weights in the layout of `kernels`, from the cache; converted first if need be.

    A part of several has its own file, with its own rows of every matrix.
    """
    wanted = _kept(spec, shard)
    key = f"{source.digest}/weights-{_fingerprint(wanted, kernels.layout)}.safetensors"

    def convert(draft: Path) -> None:
        tensors = source.tensors() if kernels.pack_groups is None else source.grouped()
        write_packed(draft, pack_weights(tensors, spec, kernels, shard), len(wanted))

    path = cache.entry(key)
    if path is not None:
        try:
            return _open(path, wanted, kernels.layout)
        except (OSError, ModelFormatError):
            path.unlink(missing_ok=True)  # damaged by something outside headway; make it anew
    return _open(cache.publish(key, convert), wanted, kernels.layout)


def pack_weights(
    tensors: Iterable[tuple[str, NDArray[np.float32] | Groups]],
    spec: ModelSpec,
    kernels: KernelSet,
    shard: Shard = WHOLE,
) -> Iterator[tuple[str, Array]]:
    """(parameter name, packed array) as soon as its parts have come; refuses what does not make up the spec."""
    begun: dict[str, _Fusion] = {}
    for param, part, _, tensor, is_complete in place_tensors(tensors, spec):
        fusion = begun.setdefault(param.name, _Fusion(param, kernels))
        fusion.place(part, tensor)
        if is_complete:
            del begun[param.name]
            yield param.name, fusion.packed(rows_of(param, spec, shard))
            if param.name == "embed" and _splits_head(spec, shard):
                head = replace(param, name="head")
                yield head.name, fusion.packed(rows_of(head, spec, shard))


def _splits_head(spec: ModelSpec, shard: Shard) -> bool:
    """Embeddings are whole in every part; a head that is tied to them is not."""
    return spec.tie_embeddings and shard.size > 1


def _kept(spec: ModelSpec, shard: Shard) -> list[Parameter]:
    """The parameters as this part has them: those of the model, with its own number of rows."""
    whole = parameters(spec)
    if _splits_head(spec, shard):
        whole += [replace(param, name="head") for param in whole if param.name == "embed"]
    kept: list[Parameter] = []
    for param in whole:
        rows = rows_of(param, spec, shard)
        part = Part(f"{param.name} {shard.rank} of {shard.size}", 0 if rows is None else len(rows))
        kept.append(param if rows is None else replace(param, parts=(part,)))
    return kept


def _open(path: Path, wanted: Sequence[Parameter], layout: str) -> ModelWeights[Array]:
    tensors = read_packed(path)
    if tensors.keys() != {param.name for param in wanted}:
        raise ModelFormatError(f"the cached weights {path} are not those of this model; remove the file")
    for param in wanted:
        if not _fits(tensors[param.name], param):
            raise ModelFormatError(f"the cached weights {path} are damaged at {param.name}; remove the file")
    return ModelWeights(tensors, layout)


def _fits(tensor: Array, param: Parameter) -> bool:
    """Whether a stored tensor can be the parameter: enough floats, or a blob that says it is such a matrix."""
    if tensor.dtype == np.uint8 and param.is_matrix:
        return is_blob(tensor, param.rows, param.columns)
    return tensor.dtype == np.float32 and tensor.size >= param.rows * max(param.columns, 1)


class _Fusion:
    """A parameter under construction: groups if the kernels take them and every part is stored so, else floats."""

    def __init__(self, param: Parameter, kernels: KernelSet) -> None:
        self._param = param
        self._kernels = kernels
        takes_groups = kernels.pack_groups is not None and not (param.is_table and kernels.pack_table is not None)
        self._groups: dict[int, Groups] | None = {} if takes_groups else None  # by part
        self._floats: NDArray[np.float32] | None = None  # only made once a part of the right shape is there

    def place(self, index: int, tensor: NDArray[np.float32] | Groups) -> None:
        """Take part number `index`."""
        if isinstance(tensor, Groups) and self._groups is not None and self._takes(tensor):
            self._groups[index] = tensor
            return
        earlier, self._groups = self._groups or {}, None
        self._widen(index, tensor)
        for other, groups in earlier.items():
            self._widen(other, groups)

    def packed(self, rows: NDArray[np.int64] | None = None) -> Array:
        """What the kernels take, once every part has come; with `rows`, of these alone."""
        param, kernels = self._param, self._kernels
        if self._groups is not None:
            return self._packed_groups([self._groups[index] for index in range(len(param.parts))], rows)
        assert self._floats is not None
        floats = self._floats if rows is None else self._floats[rows]
        if not param.is_matrix:
            return floats + np.float32(param.offset) if param.offset else floats
        pack = kernels.pack_table if param.is_table and kernels.pack_table is not None else kernels.pack
        return pack(floats)

    def _takes(self, groups: Groups) -> bool:
        return groups.size == GROUP or self._kernels.pack_bytes is not None

    def _packed_groups(self, parts: list[Groups], rows: NDArray[np.int64] | None) -> Array:
        """Of 4 bits where all parts are so; the others are all of 8, with floors if one of them has some."""
        kernels = self._kernels
        are_small = any(part.size != GROUP for part in parts)
        if are_small:
            has_floors = any(part.m is not None for part in parts)
            parts = [part.small(has_floors) for part in parts]
        floors = [part.m for part in parts if part.m is not None]
        columns = ([part.q for part in parts], [part.d for part in parts], floors)
        whole = [np.concatenate(each) if each else None for each in columns]
        q, d, m = (each if each is None or rows is None else each[rows] for each in whole)
        assert q is not None
        assert d is not None
        if are_small:
            assert kernels.pack_bytes is not None
            return kernels.pack_bytes(q, d, m)
        assert kernels.pack_groups is not None
        assert m is not None
        return kernels.pack_groups(q, d, m)

    def _widen(self, index: int, tensor: NDArray[np.float32] | Groups) -> None:
        param = self._param
        if self._floats is None:
            size = (param.rows, param.columns) if param.is_matrix else (param.rows,)
            self._floats = np.empty(size, np.float32)
        start = sum(part.rows for part in param.parts[:index])
        values = tensor.floats() if isinstance(tensor, Groups) else tensor
        self._floats[start : start + param.parts[index].rows] = values


def _fingerprint(wanted: Sequence[Parameter], layout: str) -> str:
    """Names the conversion: the same for equal parameters, layout and file format."""
    shapes = [(param.name, param.columns, param.parts, *([param.offset] if param.offset else [])) for param in wanted]
    return sha256(json.dumps([FORMAT, layout, shapes]).encode()).hexdigest()[:32]
