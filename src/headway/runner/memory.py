"""Measured bytes become a number of KV blocks. Pure arithmetic on numbers; it probes and allocates nothing."""

from __future__ import annotations

from headway.config import CacheConfig
from headway.errors import ConfigError
from headway.kernels.kv_format import kv_format

GIB = 2**30
DEFAULT_FRACTION = 4  # a quarter of the free memory ...
DEFAULT_LIMIT = 2 * GIB  # ... and no more than this, unless asked for


def block_bytes(*, layers: int, block_size: int, kv_heads: int, head_dim: int, kv_dtype: str = "float32") -> int:
    """Bytes of one block over all layers: keys and values in that format."""
    return layers * 2 * block_size * kv_heads * kv_format(kv_dtype).head_bytes(head_dim)


def count_blocks(cache: CacheConfig, *, free_bytes: int, block_bytes: int, max_model_len: int) -> int:
    """Blocks of the KV pool: as configured, or from a default share of the free memory.

    A pool must hold one request of two blocks (one, if the context is not longer than a block): with less
    nothing useful could ever be admitted. It must also fit into memory, or the system would kill the process later.
    """
    if cache.num_blocks is not None:
        asked, num_blocks = f"num_blocks {cache.num_blocks}", cache.num_blocks
    elif cache.kv_memory_gb is not None:
        asked, num_blocks = f"kv_memory_gb {cache.kv_memory_gb:g}", int(cache.kv_memory_gb * GIB) // block_bytes
    else:
        asked, budget = "a quarter of the free memory", min(free_bytes // DEFAULT_FRACTION, DEFAULT_LIMIT)
        num_blocks = budget // block_bytes
    needed = min(2, -(-max_model_len // cache.block_size))
    if num_blocks < needed:
        raise ConfigError(
            f"{asked} gives a KV pool of {num_blocks} blocks of {_size(block_bytes)}; at least {needed} are needed: "
            f"set kv_memory_gb to {needed * block_bytes / GIB:.3g} or more, or lower block_size ({cache.block_size})"
        )
    if num_blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"{asked} takes {_size(num_blocks * block_bytes)} for the KV pool; {_size(free_bytes)} are free: "
            f"allowed are up to {free_bytes // block_bytes} blocks, so ask for less or free memory"
        )
    return num_blocks


def count_host_blocks(swap_space_gb: float, *, free_bytes: int, block_bytes: int) -> int:
    """Blocks of host memory for the KV of preempted requests; `free_bytes` is what the pool itself leaves."""
    num_blocks = int(swap_space_gb * GIB) // block_bytes
    if swap_space_gb and not num_blocks:
        raise ConfigError(
            f"swap_space_gb {swap_space_gb:g} is less than one KV block of {_size(block_bytes)}: "
            f"set it to {block_bytes / GIB:.3g} or more, or to 0 for none"
        )
    if num_blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"swap_space_gb {swap_space_gb:g} takes {_size(num_blocks * block_bytes)} beside the KV pool; "
            f"{_size(max(0, free_bytes))} are free: ask for less, or lower kv_memory_gb"
        )
    return num_blocks


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"
