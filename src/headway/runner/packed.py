"""The file that holds a model's packed tensors: written one by one, read whole into memory of our own.

It is safetensors with every tensor on a 64-byte boundary: float32 as F32, blobs of a packed form as U8. Reading it
costs a copy where mapping it would not, and buys large pages, which a mapped file seldom has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.errors import ConfigError, ModelFormatError
from headway.kernels.checks import Array
from headway.modelfile.safetensors import parse_table
from headway.runner.pages import LARGE_PAGE, reserve

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_LENGTH = 8  # bytes before the header: its length
_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_PAD = "pad."  # names of the fillers between tensors: the format allows no holes


def write_packed(path: Path, tensors: Iterable[tuple[str, Array]], num_tensors: int) -> None:
    """Write tensor by tensor. The header comes first in the file and is known last, so room for it is left and filled
    up with spaces, which the format allows."""
    room = _aligned(_LENGTH + 512 * (num_tensors + 1)) - _LENGTH
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    with path.open("wb") as file:
        file.seek(_LENGTH + room)
        offset = 0
        for name, tensor in tensors:
            offset = _append(file, header, name, tensor, offset)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= room, "a parameter's name is too long"
        file.seek(0)
        file.write(room.to_bytes(_LENGTH, "little") + text.ljust(room))


def read_packed(path: Path) -> dict[str, Array]:
    """The tensors of such a file by name, views of one piece of memory; refuses a file that is not whole."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        room = int.from_bytes(file.read(_LENGTH), "little")
        start = _LENGTH + room
        if start >= size or start % ALIGNMENT:
            raise ModelFormatError(f"{path} is not a file of packed tensors")
        table = parse_table(file.read(room), size, {name: dtype.itemsize for name, dtype in _TYPES.items()})
        memory = _read(file, size - start)
    return {
        name: memory[stored.offset - start :][: stored.num_bytes].view(_TYPES[stored.type]).reshape(stored.shape)
        for name, stored in table.items()
        if not name.startswith(_PAD)
    }


def _read(file: IO[bytes], num_bytes: int) -> Array:
    try:
        pages = reserve(num_bytes, is_large=num_bytes >= LARGE_PAGE)
    except OSError as error:
        raise ConfigError(
            f"cannot reserve {num_bytes / 2**30:.2f} GiB for the weights ({error.strerror}); take a smaller model or "
            "another dtype"
        ) from error
    view, filled = memoryview(pages), 0
    while filled < num_bytes:
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise ModelFormatError(f"the file of packed weights ended after {filled} of {num_bytes} bytes")
        filled += count
    return np.frombuffer(pages, np.uint8)


def _append(file: IO[bytes], header: dict[str, object], name: str, tensor: Array, offset: int) -> int:
    end = offset + tensor.nbytes
    file.write(np.ascontiguousarray(tensor).data.cast("B"))
    header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
    padded = _aligned(end)
    if padded > end:
        file.write(bytes(padded - end))
        header[f"{_PAD}{end}"] = {"dtype": "U8", "shape": [padded - end], "data_offsets": [end, padded]}
    return padded


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
