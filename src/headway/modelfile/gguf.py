"""A reader for GGUF files, version 2 and 3, that trusts nothing in them.

Owns the container: header, metadata, tensor table, and where each tensor's bytes lie. Every count and length is
compared with the bytes that are left before it is used, and whatever the bytes are, only `ModelFormatError` comes
out. It refuses to know what the metadata means (`gguf_model`, `gguf_tokenizer`).

    magic version  counts │ key type value … │ name dims type offset … │ pad │ tensor bytes …
    └──────────── header ─┴──── metadata ────┴────── tensor table ─────┴─────┴─ offsets count from here
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headway.errors import ModelFormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headway.modelfile.groups import Groups

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 21  # array elements in all the metadata together; the largest vocabularies hold a tenth of it
MAX_METADATA_BYTES = 1 << 27
MAX_NESTING = 3
MAX_NAME_BYTES = 1 << 10
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockType:
    """A number format: `block_bytes` bytes hold `block_size` elements."""

    name: str
    block_size: int
    block_bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        30: BlockType("BF16", 1, 2),
    }
)

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: struct.Struct("<I"),
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        7: struct.Struct("<B"),
        10: struct.Struct("<Q"),
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor; its bytes lie inside the file and overlap no other's."""

    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    type: str
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file: everything in `metadata` and `tensors` has been checked against the bytes."""

    def __init__(
        self, path: Path, data: mmap.mmap, metadata: dict[str, object], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._data: mmap.mmap | None = data

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map the file and parse its tables."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFormatError(f"cannot read {path} as a GGUF file: {error}") from None
        try:
            metadata, tensors = parse(data)
        except ModelFormatError as error:
            data.close()
            raise ModelFormatError(f"{path} is not a GGUF file headway can run: {error}") from None
        return cls(path, data, metadata, tensors)

    def data(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32: a read-only view of the file for F32, a fresh array for every other type."""
        # numpy only when a tensor is touched: the API process opens files for their metadata alone.
        from headway.modelfile.dequant import dequantize

        info, raw = self._stored(name)
        return dequantize(raw, info.type).reshape(info.shape)

    def groups(self, name: str) -> Groups | None:
        """The tensor's own groups, where it is a matrix that has them."""
        from headway.modelfile.groups import read_groups

        info, raw = self._stored(name)
        return read_groups(raw, info.type, info.shape)

    def _stored(self, name: str) -> tuple[TensorInfo, memoryview]:
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.path} has no tensor {name!r}; it holds {len(self.tensors)} others")
        return info, memoryview(self._data)[info.offset : info.offset + info.num_bytes]

    def close(self) -> None:
        """Let go of the file. Views handed out stay valid: the mapping then ends with the last of them."""
        data, self._data = self._data, None
        if data is not None:
            with contextlib.suppress(BufferError):
                data.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse(data: mmap.mmap | bytes) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    """Metadata and tensor table of the bytes of a GGUF file."""
    cursor = _Cursor(data)
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise ModelFormatError(f"it starts with {magic!r}, not b'GGUF'")
    version = cursor.u32()
    if version not in (2, 3):
        raise ModelFormatError(f"it has GGUF version {version}; allowed: 2 and 3, little-endian")
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    cursor.check_count("metadata keys", num_keys, MAX_KEYS, 13)
    cursor.check_count("tensors", num_tensors, MAX_TENSORS, 32)
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = cursor.name("metadata key")
        if key in metadata:
            raise ModelFormatError(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.u32(), key, 0)
    return metadata, _tensors(cursor, num_tensors, _alignment(metadata))


def _alignment(metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_good = isinstance(value, int) and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0
    if not is_good:
        raise ModelFormatError(f"general.alignment is {value!r}; allowed: powers of two from 8 to {MAX_ALIGNMENT}")
    assert isinstance(value, int)
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: list[TensorInfo] = []
    for _ in range(count):
        found.append(_tensor(cursor, alignment))
    base = -(-cursor.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    end = base
    for info in sorted(found, key=lambda info: info.offset):
        start = base + info.offset
        if start + info.num_bytes > cursor.size:
            raise ModelFormatError(
                f"tensor {info.name!r} ends at byte {start + info.num_bytes} of a file of {cursor.size} bytes; "
                "the file is cut short or its table is wrong"
            )
        if start < end:
            raise ModelFormatError(f"tensor {info.name!r} overlaps the one before it")
        if info.name in placed:
            raise ModelFormatError(f"tensor {info.name!r} appears twice")
        end = start + info.num_bytes
        placed[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.num_bytes)
    return placed


def _tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    name = cursor.name("tensor name")
    num_dims = cursor.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelFormatError(f"tensor {name!r} has {num_dims} dimensions; allowed: 1 to {MAX_DIMS}")
    dims = [cursor.u64() for _ in range(num_dims)]
    code, offset = cursor.u32(), cursor.u64()
    kind = BLOCK_TYPES.get(code)
    if kind is None:
        names = ", ".join(kind.name for kind in BLOCK_TYPES.values())
        raise ModelFormatError(f"tensor {name!r} has number format {code}; allowed: {names}")
    num_elements = 1
    for dim in dims:
        num_elements *= dim
    # Unlike in C nothing here can wrap: Python's ints grow, so the product is compared as it is.
    if num_elements == 0 or dims[0] % kind.block_size:
        raise ModelFormatError(f"tensor {name!r} has shape {dims}, which is no whole number of {kind.name} blocks")
    num_bytes = num_elements // kind.block_size * kind.block_bytes
    if num_bytes > cursor.size:
        raise ModelFormatError(f"tensor {name!r} needs {num_bytes} bytes; the whole file has {cursor.size}")
    if offset % alignment:
        raise ModelFormatError(f"tensor {name!r} starts at offset {offset}, not a multiple of {alignment}")
    return TensorInfo(name, tuple(reversed(dims)), kind.name, offset, num_bytes)


class _Cursor:
    """A position in the bytes: `position <= size` always, and nothing is read beyond `size`."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self.size = len(data)
        self.position = 0
        self._num_elements = 0

    def skip(self, count: int) -> int:
        """Move on by `count` bytes that must be there; returns where they start."""
        start = self.position
        if count > self.size - start:
            raise ModelFormatError(f"{count} bytes are announced at byte {start}, {self.size - start} are left")
        if start + count > MAX_METADATA_BYTES:
            raise ModelFormatError(f"its metadata goes beyond {MAX_METADATA_BYTES} bytes")
        self.position = start + count
        return start

    def take(self, count: int) -> bytes:
        start = self.skip(count)
        return self._data[start : start + count]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def check_count(self, what: str, count: int, most: int, least_bytes: int) -> None:
        """Refuse a count of things that cannot be in the bytes that are left."""
        if count > most or count * least_bytes > self.size - self.position:
            raise ModelFormatError(
                f"{count} {what} are announced with {self.size - self.position} bytes left; allowed: {most} at most, "
                f"of at least {least_bytes} bytes each"
            )

    def name(self, what: str) -> str:
        length = self.u64()
        if not 1 <= length <= MAX_NAME_BYTES:
            raise ModelFormatError(f"a {what} has {length} bytes; allowed: 1 to {MAX_NAME_BYTES}")
        return self._text(self.take(length))

    def value(self, code: int, key: str, nesting: int) -> object:
        if code == _STRING:
            return self._text(self.take(self.u64()))
        if code == _ARRAY:
            return self._array(key, nesting + 1)
        form = _SCALARS.get(code)
        if form is None:
            raise ModelFormatError(f"metadata key {key!r} has value type {code}; allowed: 0 to 12")
        value = form.unpack(self.take(form.size))[0]
        if code == _BOOL and value > 1:
            raise ModelFormatError(f"metadata key {key!r} is the truth value {value}; allowed: 0 and 1")
        return bool(value) if code == _BOOL else value

    def _array(self, key: str, nesting: int) -> object:
        if nesting > MAX_NESTING:
            raise ModelFormatError(f"metadata key {key!r} nests arrays more than {MAX_NESTING} deep")
        code, count = self.u32(), self.u64()
        form = _SCALARS.get(code)
        least = 8 if code == _STRING else 12 if code == _ARRAY else form.size if form else 1
        self.check_count(f"elements of {key!r}", count, MAX_ELEMENTS - self._num_elements, least)
        self._num_elements += count
        if code == _STRING:
            return self._strings(count)
        if code == _ARRAY:
            return tuple(self.value(_ARRAY, key, nesting) for _ in range(count))
        if form is None:
            raise ModelFormatError(f"metadata key {key!r} is an array of type {code}; allowed: 0 to 12")
        raw = self.take(count * form.size)
        if code == _BOOL:
            return tuple(byte != 0 for byte in raw)
        return array(form.format[1:], struct.unpack(f"<{count}{form.format[1:]}", raw))

    def _strings(self, count: int) -> tuple[str, ...]:
        # One loop without a call per length: a vocabulary and its merges are 10^5 strings, read at every start.
        data, unpack, position = self._data, struct.Struct("<Q").unpack_from, self.position
        end = min(self.size, MAX_METADATA_BYTES)
        found: list[bytes] = []
        for _ in range(count):
            if end - position < 8:
                raise ModelFormatError(f"a string array of {count} ends at byte {end} after {len(found)}")
            start = position + 8
            length = unpack(data, position)[0]
            if length > end - start:
                raise ModelFormatError(f"a string of {length} bytes is announced at byte {start}, {end - start} left")
            position = start + length
            found.append(data[start:position])
        self.position = position
        try:
            return tuple([raw.decode() for raw in found])
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"a string is not UTF-8: {error}") from None

    @staticmethod
    def _text(raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"a string is not UTF-8: {error}") from None
