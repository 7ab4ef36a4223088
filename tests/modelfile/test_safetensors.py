"""The safetensors reader against the library's own writer, and against bytes that lie."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from headway.errors import ModelFormatError
from headway.modelfile.safetensors import SafetensorsFile, parse

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def file_of(table: object, payload: bytes = bytes(16)) -> bytes:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(raw)) + raw + payload


def entry(**changes: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_what_the_library_writes(tmp_path: Path, kind: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 5).to(kind), "b": torch.randn(7).to(kind), "one": torch.tensor(2.5).to(kind)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        got = file.data(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, tensor.float().numpy())
        raw = file.raw(name)
        assert (raw.shape, raw.type) == (tuple(tensor.shape), TYPES[kind])
        assert torch.equal(torch.frombuffer(bytearray(raw.data), dtype=kind).view(tensor.shape), tensor)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "0"),
        (b"1234567", "announced"),
        (struct.pack("<Q", 2**63) + b"{}", "announced"),
        (file_of(b"{" * 10), "JSON"),
        (file_of(b"[" * 100_000), "JSON"),
        (file_of(b"\xff\xfe{}"), "JSON"),
        (file_of([]), "object"),
        (file_of({"t": 5}), "number format"),
        (file_of(entry(dtype="I64")), "I64"),
        (file_of(entry(dtype=["F32"])), "number format"),
        (file_of(entry(shape=[2, -2])), "counts"),
        (file_of(entry(shape=[2.0, 2])), "counts"),
        (file_of(entry(shape=[True, 4])), "counts"),
        (file_of(entry(shape=[1] * 9)), "counts"),
        (file_of(entry(data_offsets=[0])), "counts"),
        (file_of(entry(data_offsets=[4, 20])), "lies at"),
        (file_of(entry(data_offsets=[16, 0])), "lies at"),
        (file_of(entry(shape=[2**40, 2**40])), "lies at"),
        (file_of({**entry(), "u": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}), "overlaps"),
    ],
)
def test_files_that_lie_are_refused_with_the_reason(raw: bytes, word: str) -> None:
    with pytest.raises(ModelFormatError, match=word):
        parse(raw)


def test_mutated_files_raise_only_our_error() -> None:
    raw = save({"a": torch.randn(3, 5), "b": torch.randn(7).half()})
    rng = random.Random(4)
    for _ in range(4000):
        mutant = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        with contextlib.suppress(ModelFormatError):
            for stored in parse(bytes(mutant)).values():
                assert stored.offset + stored.num_bytes <= len(mutant)


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"m\.safetensors"):
        SafetensorsFile(tmp_path / "m.safetensors")
