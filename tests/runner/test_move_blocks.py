"""Blocks read and written whole, outside the plans: every KV format, and the store that checks reads."""

from __future__ import annotations

import numpy as np
import pytest

from headway.engine.executor import MovesBlocks
from headway.engine.null import Capacity, NullExecutor
from headway.errors import EngineError
from headway.runner.debug_kv import DebugKVStore, prefix_numbers
from headway.runner.kvstore import KVStore
from headway.values.plan import Tier


def store(kv_dtype: str = "float32", kind: type[KVStore] = KVStore, **changes: int) -> KVStore:
    shape = {"layers": 3, "num_blocks": 5, "block_size": 4, "kv_heads": 2, "head_dim": 6, **changes}
    return kind(kv_dtype=kv_dtype, **shape)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp16", "int8"])
def test_a_block_that_was_read_and_written_elsewhere_has_the_same_bits(kv_dtype: str) -> None:
    one, other = store(kv_dtype), store(kv_dtype, num_blocks=7)
    assert one.block_layout == other.block_layout
    one.data.view(np.uint8)[...] = np.random.default_rng(1).integers(0, 255, one.data.view(np.uint8).shape)
    moved = memoryview(bytearray(one.block_bytes))
    one.read(2, moved)
    other.write(6, moved, (), 0)
    assert np.array_equal(other.data[:, :, 6].view(np.uint8), one.data[:, :, 2].view(np.uint8))
    assert not other.data[:, :, :6].any(), "no other block is touched"


def test_layouts_differ_where_bytes_mean_something_else() -> None:
    layouts = [store(kind).block_layout for kind in ("float32", "fp16", "int8")]
    layouts += [store(block_size=8).block_layout, store(layers=6).block_layout, store(kv_heads=4).block_layout]
    layouts += [store(head_dim=12).block_layout]
    assert len(set(layouts)) == len(layouts)


@pytest.mark.parametrize("num_bytes", [0, 1, 575, 577])
def test_another_length_is_refused_and_nothing_is_written(num_bytes: int) -> None:
    kv = store()
    assert kv.block_bytes == 1152
    with pytest.raises(ValueError, match=r"buffer size|cannot reshape"):
        kv.write(1, memoryview(bytes(range(1, 256)) * 5)[:num_bytes], (), 0)
    assert not kv.data.any()


def test_a_block_that_is_not_there_is_refused() -> None:
    kv, buffer = store(), memoryview(bytearray(1152))
    for block in (-1, 5):
        with pytest.raises(EngineError, match=f"block {block}"):
            kv.read(block, buffer)
        with pytest.raises(EngineError, match=f"block {block}"):
            kv.write(block, buffer, (), 0)


def test_the_store_that_checks_reads_knows_what_was_written() -> None:
    kv = store(kind=DebugKVStore)
    assert isinstance(kv, DebugKVStore)
    tokens = list(range(10, 20))
    kv.write(3, memoryview(bytes(kv.block_bytes)), tokens, 4)
    assert np.array_equal(kv._prefix[Tier.DEVICE][3], prefix_numbers(np.array(tokens[:8]))[4:])
    kv.write(3, memoryview(bytes(kv.block_bytes)), tokens, 8)  # two tokens of four: the rest holds nothing
    assert np.array_equal(kv._prefix[Tier.DEVICE][3], [*prefix_numbers(np.array(tokens))[8:], 0, 0])


def test_the_null_executor_moves_blocks() -> None:
    executor = NullExecutor(Capacity(4, 4, 2))
    assert isinstance(executor, MovesBlocks)
    buffer = memoryview(bytearray(executor.block_bytes()))
    executor.write_block(1, memoryview(b"7" * len(buffer)), (), 0)
    executor.read_block(1, buffer)
    assert bytes(buffer) == b"7" * len(buffer)
    executor.read_block(2, buffer)
    assert not any(buffer)
