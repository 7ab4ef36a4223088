"""Ray's store kept in Redis instead of files: the same as with RocksDB when the store is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config import EngineConfig
from ray_fleet import lose_store, ray_cluster, ray_fleet, redis_server
from tiny_dir import tiny_options, write_tiny_model


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as address:
        yield address


@pytest.fixture
def cluster(address: str) -> Iterator[Any]:
    with ray_cluster(address, num_cpus=4) as made:
        yield made


async def test_the_store_of_the_cluster_that_is_killed(cluster: Any, address: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_len=2048)
    config = EngineConfig.of(**tiny_options(tmp_path / "model", num_blocks=2000))
    async with ray_fleet(cluster, config, ray_min=3) as fleet:
        await lose_store(cluster, fleet)
    said = subprocess.run(["redis-cli", "-p", address.rpartition(":")[2], "keys", "*"], capture_output=True, text=True)
    assert said.stdout.strip(), "the store was somewhere else"
