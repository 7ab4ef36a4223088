"""Bytes to blocks, on numbers."""

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.errors import ConfigError
from headway.runner.memory import GIB, block_bytes, count_blocks, count_host_blocks

SMOL = block_bytes(layers=30, block_size=16, kv_heads=3, head_dim=64)


def _count(cache: CacheConfig, free_gb: float, per_block: int = SMOL, max_model_len: int = 8192) -> int:
    return count_blocks(cache, free_bytes=int(free_gb * GIB), block_bytes=per_block, max_model_len=max_model_len)


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert SMOL == 30 * 2 * 16 * 3 * 64 * 4


def test_halves_double_the_blocks_and_bytes_give_over_three_and_a_half_times_as_many() -> None:
    def blocks(kv_dtype: str, head_dim: int) -> int:
        per_block = block_bytes(layers=30, block_size=16, kv_heads=3, head_dim=head_dim, kv_dtype=kv_dtype)
        return _count(CacheConfig(kv_memory_gb=1), 8, per_block)

    for head_dim in (64, 80, 128):
        assert blocks("fp16", head_dim) in (2 * blocks("float32", head_dim), 2 * blocks("float32", head_dim) + 1)
        assert blocks("int8", head_dim) >= 3.5 * blocks("float32", head_dim)


def test_the_default_is_a_quarter_of_free_memory() -> None:
    assert _count(CacheConfig(), 4) == GIB // SMOL


def test_the_default_is_at_most_two_gib() -> None:
    assert _count(CacheConfig(), 500) == 2 * GIB // SMOL == _count(CacheConfig(), 8)


def test_memory_that_was_asked_for_is_taken() -> None:
    assert _count(CacheConfig(kv_memory_gb=3.5), 8) == int(3.5 * GIB) // SMOL


def test_a_number_of_blocks_overrides_memory() -> None:
    assert _count(CacheConfig(num_blocks=7, kv_memory_gb=3.5), 8) == 7


@pytest.mark.parametrize("cache", [CacheConfig(num_blocks=1), CacheConfig(kv_memory_gb=0.001), CacheConfig()])
def test_a_pool_without_room_for_two_blocks_is_refused(cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match=r"at least 2 are needed: set kv_memory_gb to 0\.00137 or more"):
        _count(cache, 0.003)


def test_one_block_is_enough_if_the_context_fits_into_it() -> None:
    assert _count(CacheConfig(num_blocks=1), 1, max_model_len=16) == 1
    with pytest.raises(ConfigError):
        _count(CacheConfig(num_blocks=1), 1, max_model_len=17)


@pytest.mark.parametrize("cache", [CacheConfig(kv_memory_gb=9), CacheConfig(num_blocks=13_000)])
def test_more_than_is_free_is_refused(cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match=r"8\.00 GiB are free: allowed are up to 11650 blocks"):
        _count(cache, 8)


def test_host_memory_is_counted_in_blocks_and_may_be_none() -> None:
    assert count_host_blocks(1.5, free_bytes=8 * GIB, block_bytes=SMOL) == int(1.5 * GIB) // SMOL
    assert count_host_blocks(0.0, free_bytes=0, block_bytes=SMOL) == 0


def test_host_memory_below_a_block_or_beyond_what_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"less than one KV block .* set it to 0\.000687 or more"):
        count_host_blocks(1e-6, free_bytes=8 * GIB, block_bytes=SMOL)
    with pytest.raises(ConfigError, match=r"swap_space_gb 9 takes 9\.00 GiB .* 8\.00 GiB are free"):
        count_host_blocks(9.0, free_bytes=8 * GIB, block_bytes=SMOL)


def test_sizes_beyond_any_machine_are_refused() -> None:
    for make in (lambda: CacheConfig(kv_memory_gb=1e300), lambda: SchedulerConfig(swap_space_gb=1e300)):
        with pytest.raises(ConfigError, match=r"is 1e\+300; allowed: .* 1000000"):
            make()
