"""A checkpoint's tensors become the packed form that is computed with, once; later starts map that form from disk.

    source ── name by name ──▶ fuse parts ──▶ kernels.pack ──▶ one file in the cache ──▶ mmap ──▶ Weights

The file is safetensors with every tensor on a 64-byte boundary. Nothing is ever held twice: the conversion keeps a
parameter only until it is written, and what runs are views of the mapped file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.errors import ModelFormatError
from headway.kernels.ops import KernelSet
from headway.models.params import Parameter, Part, Weights, is_ignored
from headway.models.registry import parameters
from headway.models.spec import ModelSpec

FORMAT = "1"  # of the file this module writes; part of its key
ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_PAD = "pad."  # names of the fillers between tensors: the format allows no holes


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    @property
    def digest(self) -> str:
        """Identity of the content."""

    def tensors(self) -> Iterable[tuple[str, NDArray[np.float32]]]:
        """(checkpoint name, float32 array), one at a time."""


class EntryCache(Protocol):
    """Complete entries by key."""

    def entry(self, key: str) -> Path | None:
        """The entry, if it is there."""

    def publish(self, key: str, write: Callable[[Path], None]) -> Path:
        """The entry; if it is not there `write` makes it."""


def load_weights(source: TensorSource, spec: ModelSpec, cache: EntryCache, kernels: KernelSet) -> Weights:
    """The model's weights in the layout of `kernels`, mapped from the cache; converted first if need be."""
    wanted = parameters(spec)
    key = f"{source.digest}/weights-{_fingerprint(wanted, kernels.layout)}.safetensors"

    def convert(draft: Path) -> None:
        write_packed(draft, pack_weights(source.tensors(), spec, kernels), len(wanted))

    path = cache.entry(key)
    if path is not None:
        try:
            return _open(path, wanted, kernels.layout)
        except (SafetensorError, OSError, ModelFormatError):
            path.unlink(missing_ok=True)  # damaged by something outside headway; make it anew
    return _open(cache.publish(key, convert), wanted, kernels.layout)


def pack_weights(
    tensors: Iterable[tuple[str, NDArray[np.float32]]], spec: ModelSpec, kernels: KernelSet
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, packed tensor) as soon as its parts have come; refuses what does not make up the spec."""
    places = {part.source: (param, part) for param in parameters(spec) for part in param.parts}
    missing = dict.fromkeys(places)
    begun: dict[str, Tensor] = {}
    for source, array in tensors:
        if source not in places:
            if is_ignored(source, spec):
                continue
            raise ModelFormatError(f"the model has a tensor {source!r} that a {spec.family} model has no place for")
        if source not in missing:
            raise ModelFormatError(f"the model has the tensor {source!r} twice")
        del missing[source]
        param, part = places[source]
        fused = _place(begun, param, part, array)
        if not any(other.source in missing for other in param.parts):
            del begun[param.name]
            yield param.name, kernels.pack(fused) if param.is_matrix else fused
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise ModelFormatError(f"the model lacks {len(missing)} of its tensors, among them {names}; is it complete?")


def write_packed(path: Path, tensors: Iterable[tuple[str, Tensor]], num_tensors: int) -> None:
    """Write a safetensors file tensor by tensor. The header comes first in the file and is known last, so room for it
    is left and filled up with spaces, which the format allows."""
    room = _aligned(8 + 512 * (num_tensors + 1)) - 8
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    with path.open("wb") as file:
        file.seek(8 + room)
        offset = 0
        for name, tensor in tensors:
            offset = _append(file, header, name, tensor, offset)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= room, "a parameter's name is too long"
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))


def _append(file: IO[bytes], header: dict[str, object], name: str, tensor: Tensor, offset: int) -> int:
    assert tensor.dtype == torch.float32, tensor.dtype
    end = offset + tensor.nbytes
    file.write(tensor.contiguous().numpy().data.cast("B"))
    header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
    padded = _aligned(end)
    if padded > end:
        file.write(bytes(padded - end))
        header[f"{_PAD}{end}"] = {"dtype": "U8", "shape": [padded - end], "data_offsets": [end, padded]}
    return padded


def _open(path: Path, wanted: Sequence[Parameter], layout: str) -> Weights:
    # With torch, safetensors maps the file and hands out views of the mapping.
    with safe_open(path, framework="pt", device="cpu") as file:
        names = {name for name in file.keys() if not name.startswith(_PAD)}  # noqa: SIM118
        if names != {param.name for param in wanted}:
            raise ModelFormatError(f"the cached weights {path} are not those of this model; remove the file")
        tensors = {name: file.get_tensor(name) for name in names}
    for param in wanted:
        tensor = tensors[param.name]
        enough = tensor.numel() >= param.rows * max(param.columns, 1)
        if tensor.dtype != torch.float32 or not enough:
            raise ModelFormatError(f"the cached weights {path} are damaged at {param.name}; remove the file")
    return Weights(tensors, layout)


def _place(begun: dict[str, Tensor], param: Parameter, part: Part, array: NDArray[np.float32]) -> Tensor:
    """Copy one part into its parameter's buffer, which is only made once a part of the right shape is there."""
    shape = param.part_shape(part)
    if array.shape != shape:
        got = list(array.shape)
        raise ModelFormatError(f"the tensor {part.source!r} has shape {got}; the model's config asks for {list(shape)}")
    if param.name not in begun:
        size = (param.rows, param.columns) if param.is_matrix else (param.rows,)
        begun[param.name] = torch.empty(size, dtype=torch.float32)
    fused = begun[param.name]
    start = 0
    for other in param.parts:
        if other == part:
            break
        start += other.rows
    fused.numpy()[start : start + part.rows] = array
    return fused


def _fingerprint(wanted: Sequence[Parameter], layout: str) -> str:
    """Names the conversion: the same for equal parameters, layout and file format."""
    shapes = [(param.name, param.columns, param.parts) for param in wanted]
    return sha256(json.dumps([FORMAT, layout, shapes]).encode()).hexdigest()[:32]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
