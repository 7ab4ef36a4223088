"""The paged store: reserved, zero, and copied block by block."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headway.errors import ConfigError, EngineError
from headway.kernels.ref_kv import widen
from headway.runner.kvstore import KVStore
from headway.values.plan import BlockCopy, BlockRef, Tier


def _store(num_blocks: int = 6) -> KVStore:
    kv = KVStore(layers=2, num_blocks=num_blocks, block_size=4, kv_heads=2, head_dim=8)
    kv.data[:] = np.arange(kv.data.size, dtype=np.float32).reshape(kv.data.shape)
    return kv


def _copy(src: int, dst: int, tier: Tier = Tier.DEVICE, to: Tier = Tier.DEVICE) -> BlockCopy:
    return BlockCopy(BlockRef(tier, src), BlockRef(to, dst))


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def test_a_gigabyte_pool_costs_nothing_until_it_is_written() -> None:
    before = _resident_bytes()
    kv = KVStore(layers=32, num_blocks=1024, block_size=16, kv_heads=4, head_dim=64)
    assert kv.data.nbytes == 2**30
    assert _resident_bytes() - before < 2**23
    kv.data[0, 0, :64] = 1.0
    assert _resident_bytes() - before < 2**25


def test_a_pool_of_large_pages_costs_one_for_each_side_of_a_layer_that_is_written() -> None:
    before = _resident_bytes()
    kv = KVStore(layers=4, num_blocks=2048, block_size=16, kv_heads=4, head_dim=64)
    assert kv.data.nbytes == 2**28
    assert not kv.data[:, :, 7].any()
    kv.data[:, :, 7] = 1.0
    assert kv.data[:, :, 7].all()
    assert not kv.data[:, :, 8].any()
    assert _resident_bytes() - before < 4 * 2 * 2**21 + 2**23


def test_a_touched_pool_has_its_memory_and_still_reads_zero() -> None:
    kv = KVStore(layers=2, num_blocks=2048, block_size=16, kv_heads=4, head_dim=32)
    before = _resident_bytes()
    kv.touch()
    assert _resident_bytes() - before > 0.9 * kv.data.nbytes
    assert not kv.data.any()


def test_unwritten_cells_are_zero() -> None:
    kv = KVStore(layers=1, num_blocks=3, block_size=4, kv_heads=1, head_dim=2)
    assert kv.data.shape == (1, 2, 3, 4, 1, 2)
    assert not kv.data.any()


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "record"),
    [("float32", np.float32, 8), ("fp16", np.float16, 8), ("int8", np.uint8, 12)],
)
def test_every_format_reserves_zero_records_and_copies_whole_blocks(kv_dtype: str, dtype: type, record: int) -> None:
    kv = KVStore(layers=2, num_blocks=5, block_size=4, kv_heads=3, head_dim=8, kv_dtype=kv_dtype)
    assert (kv.data.shape, kv.data.dtype) == ((2, 2, 5, 4, 3, record), dtype)
    assert not kv.data.any()
    assert not widen(torch.from_numpy(kv.data)).any()
    raw = kv.data.view(np.uint8)
    raw[:] = np.random.default_rng(0).integers(256, size=raw.shape, dtype=np.uint8)
    before = raw.copy()
    kv.copy([_copy(1, 4)])
    assert np.array_equal(raw[:, :, 4], before[:, :, 1])
    assert np.array_equal(raw[:, :, :4], before[:, :, :4])


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'int4'; allowed: float32, fp16, int8"):
        KVStore(layers=1, num_blocks=1, block_size=1, kv_heads=1, head_dim=8, kv_dtype="int4")


def test_a_copy_takes_keys_and_values_of_all_layers_and_nothing_else() -> None:
    kv = _store()
    before = kv.data.copy()
    kv.copy([_copy(1, 4)])
    assert np.array_equal(kv.data[:, :, 4], before[:, :, 1])
    assert np.array_equal(kv.data[:, :, [0, 1, 2, 3, 5]], before[:, :, [0, 1, 2, 3, 5]])


def test_copies_run_in_order() -> None:
    kv = _store()
    before = kv.data.copy()
    kv.copy([_copy(1, 2), _copy(2, 3), _copy(0, 1)])
    assert np.array_equal(kv.data[:, :, 3], before[:, :, 1])
    assert np.array_equal(kv.data[:, :, 1], before[:, :, 0])


@pytest.mark.parametrize(
    ("bad", "message"),
    [(_copy(0, 2, Tier.HOST), "names tier HOST"), (_copy(0, 6), "block 6; .* 0 to 5"), (_copy(-1, 0), "block -1")],
)
def test_a_copy_list_with_a_bad_reference_copies_nothing(bad: BlockCopy, message: str) -> None:
    kv = _store()
    before = kv.data.copy()
    with pytest.raises(EngineError, match=message):
        kv.copy([_copy(1, 2), bad])
    assert np.array_equal(kv.data, before)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp16", "int8"])
def test_a_block_comes_back_from_host_memory_bit_for_bit(kv_dtype: str) -> None:
    kv = KVStore(layers=3, num_blocks=4, block_size=4, kv_heads=2, head_dim=8, kv_dtype=kv_dtype, host_blocks=2)
    raw = kv.data.view(np.uint8)
    raw[:] = np.random.default_rng(0).integers(256, size=raw.shape, dtype=np.uint8)
    before = raw.copy()
    kv.copy([_copy(1, 1, to=Tier.HOST), _copy(2, 0, to=Tier.HOST), _copy(3, 1), _copy(1, 0, Tier.HOST)])
    assert np.array_equal(raw[:, :, 0], before[:, :, 1])
    assert np.array_equal(raw[:, :, 1], before[:, :, 3])
    kv.copy([_copy(0, 3, Tier.HOST)])
    assert np.array_equal(raw[:, :, 3], before[:, :, 2])


def test_host_memory_ends_where_it_was_said_to() -> None:
    kv = KVStore(layers=1, num_blocks=4, block_size=4, kv_heads=1, head_dim=8, host_blocks=2)
    with pytest.raises(EngineError, match=r"HOST block 2; .* 0 to 1"):
        kv.copy([_copy(0, 2, to=Tier.HOST)])


def test_a_pool_beyond_the_address_space_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="lower kv_memory_gb"):
        KVStore(layers=1000, num_blocks=10**9, block_size=16, kv_heads=8, head_dim=128)
