"""A reader for safetensors files that gives float32 arrays, or the bytes as they are.

Owns the container: an 8-byte length, a JSON table, the bytes. Every offset is checked against the file before it is
used. bfloat16 is widened by hand because numpy has no such type. Refuses to know what the tensors mean.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headway.errors import ModelFormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_HEADER_BYTES = 1 << 26
MAX_TENSORS = 1 << 16
MAX_DIMS = 8
_BYTES: Mapping[str, int] = MappingProxyType({"F32": 4, "F16": 2, "BF16": 2})
WITH_WORDS: Mapping[str, int] = MappingProxyType({**_BYTES, "I32": 4})
"""The formats of checkpoints whose matrices are packed into words."""

_COUNTING = ("position_ids", "token_type_ids")
"""Ends of names of whole numbers that old checkpoints hold beside their weights, and that count or are zeros."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor; its bytes lie inside the file and overlap no other's."""

    shape: tuple[int, ...]
    type: str
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as its file has it; the bytes are a view of the file."""

    shape: tuple[int, ...]
    type: str  # F32, F16 or BF16; I32 only where words are allowed
    data: memoryview


class SafetensorsFile:
    """An open safetensors file: every tensor in `tensors` has been checked against the bytes."""

    def __init__(self, path: Path, types: Mapping[str, int] = _BYTES) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFormatError(f"cannot read {path} as a safetensors file: {error}") from None
        try:
            self.tensors: Mapping[str, Stored] = MappingProxyType(parse(self._data, types))
        except ModelFormatError as error:
            self._data.close()
            raise ModelFormatError(f"{path} is not a safetensors file headway can run: {error}") from None

    def data(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32: a read-only view of the file for F32, a fresh array otherwise."""
        # numpy only when a tensor is touched: the API process reads tables alone.
        from headway.modelfile.dequant import dequantize

        raw = self.raw(name)
        return dequantize(raw.data, raw.type).reshape(raw.shape)

    def raw(self, name: str) -> RawTensor:
        """The tensor in the format that it is stored in; nothing is copied."""
        stored = self.tensors[name]
        data = memoryview(self._data)[stored.offset : stored.offset + stored.num_bytes]
        return RawTensor(stored.shape, stored.type, data)


def parse(data: mmap.mmap | bytes, types: Mapping[str, int] = _BYTES) -> dict[str, Stored]:
    """The table of the bytes of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ModelFormatError(f"its table is announced with {length} bytes in a file of {len(data)}")
    return parse_table(data[8 : 8 + length], len(data), types)


def parse_table(text: bytes, size: int, types: Mapping[str, int]) -> dict[str, Stored]:
    """The table of a file of `size` bytes; `types` are the number formats allowed, with their bytes."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"its table is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ModelFormatError("its table is not a JSON object")
    table.pop("__metadata__", None)
    if len(table) > MAX_TENSORS:
        raise ModelFormatError(f"it announces {len(table)} tensors; allowed: {MAX_TENSORS} at most")
    for name in [name for name in table if name.endswith(_COUNTING)]:
        del table[name]
    found = {name: _stored(name, entry, 8 + len(text), size, types) for name, entry in table.items()}
    end = 0
    for name, stored in sorted(found.items(), key=lambda item: item[1].offset):
        if stored.offset < end:
            raise ModelFormatError(f"tensor {name!r} overlaps the one before it")
        end = stored.offset + stored.num_bytes
    return found


def _stored(name: str, entry: object, base: int, size: int, types: Mapping[str, int]) -> Stored:
    fields = entry if isinstance(entry, dict) else {}
    kind = fields.get("dtype")
    if not isinstance(kind, str) or kind not in types:
        raise ModelFormatError(
            f"tensor {name!r} has number format {kind!r}; allowed: {', '.join(types)}. Quantized checkpoints "
            "are taken as GGUF files"
        )
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMS or offsets is None or len(offsets) != 2:
        raise ModelFormatError(f"tensor {name!r} has a shape or offsets that are no counts: {entry!r:.200}")
    num_bytes = types[kind]
    for dim in shape:
        num_bytes *= dim
    start, end = offsets
    if end - start != num_bytes or base + end > size:
        raise ModelFormatError(f"tensor {name!r} of {num_bytes} bytes lies at {start} to {end} of {size - base}")
    return Stored(shape, kind, base + start, num_bytes)


def _counts(value: object) -> tuple[int, ...] | None:
    is_good = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return tuple(value) if is_good and isinstance(value, list) else None
