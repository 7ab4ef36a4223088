"""The GGUF reader: right files read right, and no bytes whatever raise anything but ModelFormatError."""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gguf_files import ARRAY, BOOL, STRING, U8, Draft, Entry, array, draft, string, tiny_model, value, write
from headway.errors import ModelFormatError
from headway.modelfile.bundled import SMOLLM2, locate
from headway.modelfile.cache import ModelCache
from headway.modelfile.gguf import MAX_ELEMENTS, GGUFFile, parse


def small() -> Draft:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
    return draft({"general.architecture": "llama", "n": 5, "x": 0.5, "flag": True, "words": ["hi", "ho"]}, tensors)


def refused(bytes_or_draft: bytes | Draft) -> str:
    raw = bytes_or_draft.build() if isinstance(bytes_or_draft, Draft) else bytes_or_draft
    with pytest.raises(ModelFormatError) as caught:
        parse(raw)
    return str(caught.value)


def test_reads_what_the_reference_writer_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße 🙂")
    writer.add_array("words", ["a", "", "日本"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("truths", [True, False])
    writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("h", np.arange(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        got = file.metadata
        assert (got["u8"], got["i64"], got["f64"], got["yes"], got["text"]) == (200, -(2**40), 1e300, True, "grüße 🙂")
        assert got["words"] == ("a", "", "日本")
        assert list(got["numbers"]) == [1, -2, 3]  # type: ignore[call-overload]
        assert got["truths"] == (True, False)
        assert file.tensors["w"].shape == (3, 4)
        np.testing.assert_array_equal(file.data("w"), np.arange(12, dtype=np.float32).reshape(3, 4))
        np.testing.assert_array_equal(file.data("h"), np.arange(8, dtype=np.float32))


def test_versions_2_and_3_are_read_and_others_refused() -> None:
    for version in (2, 3):
        made = small()
        made.version = version
        metadata, tensors = parse(made.build())
        assert metadata["n"] == 5
        assert tensors["a"].shape == (2, 3)
    for version in (0, 1, 4, 3 << 24):
        made = small()
        made.version = version
        assert "version" in refused(made)


def test_every_truncation_is_refused() -> None:
    raw = small().build()
    parse(raw)
    for end in range(len(raw) - 16):  # the last tensor needs all but its padding
        refused(raw[:end])


def test_mutated_files_raise_only_our_error() -> None:
    raw = small().build()
    rng = random.Random(20)
    extremes = [b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 2**32), struct.pack("<Q", 2**31)]
    num_refused = 0
    for _ in range(8000):
        mutant = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(4, len(mutant))
            if rng.random() < 0.5:
                mutant[at] ^= 1 << rng.randrange(8)
            else:
                patch = rng.choice(extremes)[: len(mutant) - at]
                mutant[at : at + len(patch)] = patch
        try:
            _, tensors = parse(bytes(mutant))
        except ModelFormatError:
            num_refused += 1
        else:
            assert all(info.offset + info.num_bytes <= len(mutant) for info in tensors.values())
    assert num_refused > 4000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
def test_any_bytes_after_the_magic_raise_only_our_error(tail: bytes) -> None:
    for head in (b"", b"GGUF", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7)):
        with contextlib.suppress(ModelFormatError):
            parse(head + tail)


def one(pairs: list[tuple[str, bytes]]) -> Draft:
    return Draft(pairs=pairs)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (Draft(num_pairs=2**62), "announced"),
        (Draft(num_entries=2**62), "announced"),
        (Draft(num_pairs=10**6, payload=bytes(20 * 10**6)), "announced"),
        (one([("a", value(1)), ("a", value(2))]), "twice"),
        (one([("", value(1))]), "0 bytes"),
        (one([("k" * 2000, value(1))]), "2000 bytes"),
        (one([("a", struct.pack("<I", 77))]), "type 77"),
        (one([("a", struct.pack("<IIQ", ARRAY, 77, 1) + bytes(8))]), "type 77"),
        (one([("a", struct.pack("<IIQ", ARRAY, U8, 2**61))]), "announced"),
        (one([("a", struct.pack("<IIQ", ARRAY, STRING, 2**20) + string("x"))]), "announced"),
        (one([("a", struct.pack("<IIQ", ARRAY, STRING, 2) + string("x") + struct.pack("<Q", 2**60))]), "string"),
        (one([("a", struct.pack("<I", STRING) + string(b"\xff\xfe"))]), "UTF-8"),
        (one([("a", struct.pack("<I", ARRAY) + struct.pack("<IQ", STRING, 1) + string(b"\xff"))]), "UTF-8"),
        (one([("a", struct.pack("<IB", BOOL, 2))]), "truth"),
        (one([("a", struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 9 + array(U8, [1]))]), "deep"),
        (one([("general.alignment", value(24))]), "alignment"),
        (one([("general.alignment", value(0))]), "alignment"),
        (one([("general.alignment", value("32"))]), "alignment"),
        (one([("a", struct.pack("<IIQ", ARRAY, U8, MAX_ELEMENTS + 1) + bytes(MAX_ELEMENTS + 1))]), "announced"),
    ],
)
def test_hostile_metadata_is_refused_with_its_reason(made: Draft, word: str) -> None:
    assert word in refused(made)


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([Entry("t", (4,), 0, 32)], "ends at byte"),
        ([Entry("t", (4,), 0, 8)], "multiple"),
        ([Entry("t", (4,), 99, 0)], "number format"),
        ([Entry("t", (4,), 16, 0)], "number format"),
        ([Entry("t", (0,), 0, 0)], "shape"),
        ([Entry("t", (33,), 3, 0)], "shape"),
        ([Entry("t", (), 0, 0)], "dimensions"),
        ([Entry("t", (1, 1, 1, 1, 1), 0, 0)], "dimensions"),
        ([Entry("t", (2**63, 2**63), 0, 0)], "needs"),
        ([Entry("t", (2**32, 2**32), 0, 0)], "needs"),
        ([Entry("t", (4,), 0, 2**64 - 32)], "ends at byte"),
        ([Entry("t", (2,), 0, 0), Entry("u", (2,), 0, 0)], "overlaps"),
    ],
)
def test_hostile_tensor_tables_are_refused_with_their_reason(entries: list[Entry], word: str) -> None:
    assert word in refused(Draft(entries=entries, payload=bytes(32)))


def test_a_tensor_that_appears_twice_is_refused() -> None:
    entries = [Entry("t", (2,), 0, 0), Entry("t", (2,), 0, 32)]
    assert "twice" in refused(Draft(entries=entries, payload=bytes(64)))


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.mkdir(), lambda path: None])
def test_what_cannot_be_opened_is_refused_by_name(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "x.gguf"
    make(path)
    with pytest.raises(ModelFormatError, match=r"x\.gguf"):
        GGUFFile.open(path)


def test_views_outlive_the_file_object(tmp_path: Path) -> None:
    metadata, tensors = tiny_model()
    file = GGUFFile.open(write(tmp_path / "x.gguf", metadata, tensors))
    view = file.data("token_embd.weight")
    assert not view.flags.writeable
    file.close()
    np.testing.assert_array_equal(view, tensors["token_embd.weight"])
    with pytest.raises(ModelFormatError, match="no tensor"):
        GGUFFile.open(tmp_path / "x.gguf").data("nope")


def test_the_bundled_model_opens_in_under_a_second(tmp_path: Path) -> None:
    path = locate(SMOLLM2, ModelCache(tmp_path))
    assert path is not None
    start = time.perf_counter()
    with GGUFFile.open(path) as file:
        assert time.perf_counter() - start < 1.0
        assert len(file.tensors) == 272
        assert file.data("blk.0.attn_k.weight").shape == (192, 576)
