"""The tier that a configuration asks for: host memory, disk, or none."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path

from headway.config import CacheConfig
from headway.engine.client import EngineInfo
from headway.engine.tier.disk import DiskTier
from headway.engine.tier.host import HostTier
from headway.engine.tier.keeper import BlockKeeper
from headway.errors import ConfigError

log = logging.getLogger(__name__)

_LEAST_BLOCKS = 8


def block_identity(info: EngineInfo, layout: str) -> bytes:
    """Of whatever the bits of a block depend on beside its tokens: engines exchange blocks only if theirs are equal."""
    parts = [info.identity, layout, *(f"{name}={value}" for name, value in sorted(info.computes_with().items()))]
    return sha256("\0".join(parts).encode()).digest()


def make_keeper(cache: CacheConfig, folder: Path, identity: bytes, block_bytes: int) -> BlockKeeper | None:
    """The thread over what is asked for; None: nothing is."""
    for name, size in (("kv_host_bytes", cache.kv_host_bytes), ("kv_disk_bytes", cache.kv_disk_bytes)):
        if 0 < size < _LEAST_BLOCKS * block_bytes:
            raise ConfigError(
                f"{name} is {size}; a KV block has {block_bytes} bytes: allowed are 0 (none) and "
                f"{_LEAST_BLOCKS * block_bytes} or more"
            )
    host = HostTier(cache.kv_host_bytes) if cache.kv_host_bytes else None
    disk = DiskTier(folder, cache.kv_disk_bytes, identity, block_bytes) if cache.kv_disk_bytes else None
    if disk is not None:
        log.info("%d KV blocks are on disk in %s", len(disk), folder)
    return None if host is None and disk is None else BlockKeeper(host, disk)
