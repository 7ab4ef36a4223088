"""Engines on a Ray cluster of three nodes: whatever part of it is killed under load, no stream notices."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import EngineConfig
from ray_fleet import (
    BACK_S,
    ORPHAN_S,
    Load,
    RayFleet,
    kill,
    lose_store,
    parent_of,
    ray_cluster,
    ray_fleet,
    until_gone,
)
from tiny_dir import tiny_options, write_tiny_model

SCALE_S = 10.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, max_len=2048)
    return EngineConfig.of(**tiny_options(folder, num_blocks=2000))


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gcs")


@pytest.fixture(scope="module")
def cluster(storage: Path) -> Iterator[Any]:
    with ray_cluster(storage, num_cpus=4) as made:
        yield made


@pytest.fixture
async def fleet(cluster: Any, config: EngineConfig) -> AsyncIterator[RayFleet]:
    async with ray_fleet(cluster, config, ray_min=3) as made:
        yield made


async def disturb(fleet: RayFleet, victim: int, *also_gone: int) -> None:
    """Kill a process under load; the engine `also_gone` has to end with it, and another one has to come."""
    load = Load(fleet)
    await load.record()
    engine = also_gone[0] if also_gone else victim
    async with load.running():
        while load.num_done < 4:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        kill(victim)
        orphan_s = await until_gone([engine], ORPHAN_S)
        await fleet.until(3, BACK_S, gone=engine)
        back_s = time.monotonic() - began
    assert load.num_moved > 0
    print(
        f"\n  {load.num_done} streams equal, {load.num_moved} moved; no engine left after {orphan_s:.2f} s, "
        f"three again after {back_s:.1f} s"
    )


async def test_an_engine_that_is_killed(fleet: RayFleet) -> None:
    await disturb(fleet, fleet.pids[0])


async def test_a_keeper_that_is_killed_takes_its_engine_along(fleet: RayFleet) -> None:
    engine = fleet.pids[0]
    await disturb(fleet, parent_of(engine), engine)


async def test_a_node_that_is_killed_takes_its_engines_along(cluster: Any, fleet: RayFleet) -> None:
    head = cluster.head_node.all_processes["raylet"][0].process.pid
    engine = next(pid for pid in fleet.pids if parent_of(parent_of(pid)) != head)
    raylet = parent_of(parent_of(engine))
    node = next(each for each in cluster.worker_nodes if each.all_processes["raylet"][0].process.pid == raylet)
    try:
        await disturb(fleet, raylet, *(pid for pid in fleet.pids if parent_of(parent_of(pid)) == raylet))
    finally:
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=3, object_store_memory=80 * 1024 * 1024)


async def test_the_driver_that_is_killed_is_replaced_and_the_engines_stay(fleet: RayFleet) -> None:
    load, before = Load(fleet), set(fleet.pids)
    await load.record()
    assert fleet.ray._process is not None
    driver = fleet.ray._process.pid
    async with load.running():
        kill(driver)
        began = time.monotonic()
        while fleet.ray._process is None or fleet.ray._process.pid == driver:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.05)
        # The new one has taken over once an engine that is killed with its keeper comes back.
        engine = fleet.pids[0]
        kill(parent_of(engine))
        await until_gone([engine], ORPHAN_S)
        await fleet.until(3, 2 * BACK_S, gone=engine)
    assert len(before & set(fleet.pids)) == 2
    print(f"\n  {load.num_done} streams equal")


async def test_a_board_that_is_lost_is_replaced(cluster: Any, fleet: RayFleet) -> None:
    """As when the head is lost: keepers that come now would find no orders."""
    assert fleet.ray._process is not None
    driver = fleet.ray._process.pid
    lose = "ray.kill(ray.get_actor('headway-board', namespace='headway'))"
    code = f"import ray; ray.init(address={cluster.address!r}); {lose}"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True, capture_output=True)
    engine = fleet.pids[0]
    kill(parent_of(engine))
    await until_gone([engine], ORPHAN_S)
    await fleet.until(3, 3 * BACK_S, gone=engine)
    assert fleet.ray._process is not None
    assert fleet.ray._process.pid != driver


async def test_the_store_of_the_cluster_that_is_killed(cluster: Any, fleet: RayFleet) -> None:
    await lose_store(cluster, fleet)


async def test_as_many_engines_as_the_load_needs(cluster: Any, config: EngineConfig) -> None:
    async with ray_fleet(cluster, config, ray_min=1, ray_max=3, ray_requests=4.0) as fleet:
        load = Load(fleet, num_streams=12)
        await load.record()
        await fleet.until(1)
        async with load.running():
            up_s = await fleet.until(3, SCALE_S)
        began = time.monotonic()
        await fleet.until(1, SCALE_S)
        down_s = time.monotonic() - began
        print(
            f"\n  ray_up_s 0, ray_down_s 0: one to three engines in {up_s:.1f} s, three to one in {down_s:.1f} s; "
            f"{load.num_done} streams equal"
        )


async def test_an_engine_of_two_processes_takes_two_bundles_of_one_node(cluster: Any, config: EngineConfig) -> None:
    spread = replace(config, model=replace(config.model, tensor_parallel=2))
    async with ray_fleet(cluster, config, ray_min=1) as fleet:
        load = Load(fleet, num_streams=2)
        await load.record()
        whole = load.golden
    async with ray_fleet(cluster, spread, ray_min=1, ray_cpus=2.0) as fleet:
        load = Load(fleet, num_streams=2)
        await load.record()
        assert load.golden == whole
        lines = (
            "import ray; from ray.util import placement_group_table",
            f"ray.init(address={cluster.address!r})",
            "groups = [each for each in placement_group_table().values() if each['state'] == 'CREATED']",
            "print([(each['strategy'], each['bundles']) for each in groups])",
        )
        code = "\n".join(lines)
        told = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
        assert told.stdout.strip() == "[('STRICT_PACK', {0: {'CPU': 2.0}, 1: {'CPU': 2.0}})]", told


async def test_nothing_is_left_when_the_server_ends(cluster: Any, config: EngineConfig) -> None:
    async with ray_fleet(cluster, config, ray_min=2) as fleet:
        pids = set(fleet.pids)
    await until_gone(pids, 0.1)


async def test_nothing_is_left_when_the_driver_and_its_server_are_killed(cluster: Any, config: EngineConfig) -> None:
    """Another server takes the application's place."""
    async with ray_fleet(cluster, config, ray_min=1) as fleet:
        (engine,) = fleet.pids
        assert fleet.ray._process is not None
        assert fleet.ray._task is not None
        fleet.ray._task.cancel()
        kill(fleet.ray._process.pid)
        async with ray_fleet(cluster, config, ray_min=1) as other:
            assert engine not in other.pids
            await until_gone([engine], ORPHAN_S)


async def test_the_key_of_the_fleet_is_in_no_file_and_no_environment(
    cluster: Any, config: EngineConfig, storage: Path, fleet: RayFleet
) -> None:
    key = fleet.key.encode()
    logs, name = Path(cluster.head_node.get_session_dir_path()), fleet.ray._config.ray.ray_name.encode()
    files = [path for folder in (logs, storage) for path in folder.rglob("*") if path.is_file()]
    found = {path: path.read_bytes() for path in files}
    assert any(name in raw for raw in found.values())  # the application is in these files; its key is not
    assert not [path for path, raw in found.items() if key in raw]
    for pid in {*fleet.pids, *map(parent_of, fleet.pids)}:
        for what in ("environ", "cmdline"):
            assert key not in Path(f"/proc/{pid}/{what}").read_bytes()
