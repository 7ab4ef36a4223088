"""Blocks of quantized numbers to float32, one vectorised function per format.

Owns the byte layouts. A block holds one or more float16 scales and small integers; each function takes the blocks as
bytes and gives their elements in order. Knows nothing of files and names. Imported only when a tensor is touched:
numpy starts here.

    Q4_1   d m │ 16 bytes, low nibbles are elements 0-15, high ones 16-31      x = d·q + m
    Q4_K   d dmin │ 12 bytes: eight 6-bit scales and minima │ 128 bytes        x = (d·s)·q - (dmin·m)
    Q6_K   128 low nibbles │ 64 bytes of high 2 bits │ 16 int8 scales │ d      x = (d·s)·(q - 32)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
Floats = npt.NDArray[np.float32]  # [num_blocks, block_size]

# Blocks are unpacked in runs that fit a core's cache: a whole embedding at once would need several times its size.
_RUN_ELEMENTS = 1 << 16


def dequantize(raw: memoryview | bytes, kind: str) -> npt.NDArray[np.float32]:
    """All elements of `raw`, flat. F32 comes back as a view of the same bytes."""
    if kind == "F32":
        return np.frombuffer(raw, dtype="<f4")
    if kind == "F16":
        return np.frombuffer(raw, dtype="<f2").astype(np.float32)
    if kind == "BF16":
        return widen_bfloat16(raw)
    block_size, block_bytes, unpack = _FORMATS[kind]
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_size), dtype=np.float32)
    run = _RUN_ELEMENTS // block_size
    # A hostile scale may be infinite; this file does not judge weights.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), run):
            out[start : start + run] = unpack(blocks[start : start + run])
    return out.reshape(-1)


def widen_bfloat16(raw: memoryview | bytes) -> npt.NDArray[np.float32]:
    """bfloat16 is the upper half of a float32."""
    wide = np.frombuffer(raw, dtype="<u2").astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def half(blocks: Bytes, start: int) -> Floats:
    """The float16 at `start` of each block.  -> [num_blocks, 1]"""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones.  [num_blocks, 16] -> [num_blocks, 32]"""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of four bytes belongs to element i; shifted to where it adds 16.  [num_blocks, 4] -> [num_blocks, 32]"""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    q = nibbles(blocks[:, 2:18]).astype(np.float32) - np.float32(8)
    return half(blocks, 0) * q


def _q4_1(blocks: Bytes) -> Floats:
    return half(blocks, 0) * nibbles(blocks[:, 4:20]).astype(np.float32) + half(blocks, 2)


def five_bits(packed: Bytes) -> Bytes:
    """Four bytes of fifth bits, then 16 of nibbles.  [num_blocks, 20] -> [num_blocks, 32]"""
    return nibbles(packed[:, 4:20]) | _fifth_bits(packed[:, 0:4])


def _q5_0(blocks: Bytes) -> Floats:
    q = five_bits(blocks[:, 2:22])
    return half(blocks, 0) * (q.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    q = five_bits(blocks[:, 4:24])
    return half(blocks, 0) * q.astype(np.float32) + half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)


def scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes.  [num_blocks, 12] -> two of [num_blocks, 8, 1]

    Bytes 0-3 and 4-7 hold numbers 0-3 in their low 6 bits; their top 2 bits, with a nibble of bytes 8-11, make
    numbers 4-7.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, four, two = np.uint8(63), np.uint8(15), np.uint8(6)
    scales = np.concatenate([low & six, (high & four) | ((low >> two) << np.uint8(4))], axis=1)
    minima = np.concatenate([middle & six, (high >> np.uint8(4)) | ((middle >> two) << np.uint8(4))], axis=1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    packed = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    q = (packed >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & np.uint8(15)
    return _scaled(blocks, scales, minima, q.reshape(-1, 8, 32))


def five_bits_k(blocks: Bytes) -> Bytes:
    """The integers of Q5_K blocks, [num_blocks, 8, 32]."""
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    packed = blocks[:, 48:176].reshape(-1, 4, 1, 32)
    q = (packed >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & np.uint8(15)
    whole: Bytes = q.reshape(-1, 8, 32) | (fifth << np.uint8(4))
    return whole


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return _scaled(blocks, scales, minima, five_bits_k(blocks))


def _scaled(blocks: Bytes, scales: Floats, minima: Floats, q: Bytes) -> Floats:
    steps = half(blocks, 0)[:, :, None] * scales
    floors = half(blocks, 2)[:, :, None] * minima
    return (steps * q.astype(np.float32) - floors).reshape(-1, 256)


def six_bits_k(blocks: Bytes) -> Bytes:
    """The integers of Q6_K blocks, [num_blocks, 256]."""
    low = (blocks[:, 0:128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & np.uint8(15)
    twos = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> twos) & np.uint8(3)
    whole: Bytes = low.reshape(-1, 256) | (high.reshape(-1, 256) << np.uint8(4))
    return whole


def _q6_k(blocks: Bytes) -> Floats:
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    signed = six_bits_k(blocks).astype(np.float32) - np.float32(32)
    steps = (half(blocks, 208) * scales)[:, :, None]
    return (steps * signed.reshape(-1, 16, 16)).reshape(-1, 256)


_FORMATS: Mapping[str, tuple[int, int, Callable[[Bytes], Floats]]] = MappingProxyType(
    {
        "Q4_0": (32, 18, _q4_0),
        "Q4_1": (32, 20, _q4_1),
        "Q5_0": (32, 22, _q5_0),
        "Q5_1": (32, 24, _q5_1),
        "Q8_0": (32, 34, _q8_0),
        "Q4_K": (256, 144, _q4_k),
        "Q5_K": (256, 176, _q5_k),
        "Q6_K": (256, 210, _q6_k),
    }
)
