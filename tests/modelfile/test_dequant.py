"""Every number format against the `gguf` package's own dequantizers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference

from headway.modelfile.dequant import dequantize
from headway.modelfile.gguf import BLOCK_TYPES

# Where each format keeps its float16 scales; random bytes there would be NaN or infinity too often.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(kind: str, count: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, size=(count, size), dtype=np.uint8)
    for start in SCALES[kind]:
        scale = rng.normal(scale=0.1, size=(count, 1)).astype("<f2")
        blocks[:, start : start + 2] = scale.view(np.uint8)
    return blocks.tobytes()


@pytest.mark.parametrize("kind", sorted(SCALES))
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_quantized_blocks_unpack_bit_equal_to_the_reference(kind: str, count: int) -> None:
    raw = random_blocks(kind, count, seed=count)
    wanted = reference(np.frombuffer(raw, np.uint8).reshape(count, -1), GGMLQuantizationType[kind]).reshape(-1)
    got = dequantize(memoryview(raw), kind)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize(("kind", "size"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_plain_numbers_widen_bit_equal_to_the_reference(kind: str, size: int) -> None:
    rng = np.random.default_rng(3)
    raw = rng.normal(size=4096 * size // 4).astype("<f4").tobytes()
    if kind == "F16":
        raw = rng.normal(size=4096).astype("<f2").tobytes()
    wanted = reference(np.frombuffer(raw, np.uint8).reshape(1, -1), GGMLQuantizationType[kind]).reshape(-1)
    np.testing.assert_array_equal(dequantize(raw, kind).view(np.uint32), wanted.view(np.uint32))


def test_every_format_the_reader_accepts_has_the_reference_block_size() -> None:
    for code, kind in BLOCK_TYPES.items():
        assert GGMLQuantizationType(code).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(code)] == (kind.block_size, kind.block_bytes)


def test_float32_is_a_view_of_the_bytes() -> None:
    raw = bytearray(np.arange(4, dtype="<f4").tobytes())
    view = dequantize(memoryview(raw), "F32")
    raw[0:4] = np.float32(9.0).tobytes()
    assert view[0] == 9.0
