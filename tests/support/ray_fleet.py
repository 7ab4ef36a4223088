"""A Ray cluster of three nodes on this machine, and fronts whose engines it runs. Needs Ray: for tests/on_ray alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from echo_streams import rest
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.config import EngineConfig, ServeConfig
from headway.config_ray import RayConfig
from headway.engine.client import Submit
from headway.errors import EngineError
from headway.serve.ray_front import RayFront, for_ray
from headway.values.params import SamplingParams

STORE_BYTES = 80 * 1024 * 1024  # of each node; nothing of ours lies there
NUM_TOKENS = 400
BACK_S, ORPHAN_S = 30.0, 10.0


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Its address; it listens to this machine, and writes nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def ray_cluster(storage: Path | str, num_cpus: int = 3) -> Iterator[Any]:
    """A head and two workers. Ray's store survives its server, in files under `storage`, or in Redis at that address.

    Nothing is left at the end.
    """
    for name in ("RAY_gcs_storage", "RAY_gcs_storage_path", "RAY_REDIS_ADDRESS"):
        os.environ.pop(name, None)
    if isinstance(storage, str):
        os.environ["RAY_REDIS_ADDRESS"] = storage
    else:
        os.environ |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(storage)}
    os.environ |= {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    from ray.cluster_utils import Cluster

    node = {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(2):
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


class RayFleet:
    """A front with engines on a cluster. Ask it for processes by what they are; kill them by `kill`."""

    def __init__(self, client: FleetClient, ray: RayFront, key: str) -> None:
        self.client, self.ray, self.key = client, ray, key
        self.failures: list[Exception] = []

    @property
    def pids(self) -> list[int]:
        """Of the engines that take requests."""
        return [pid for each in self.client.replicas if each.engine.takes_requests and (pid := each.engine.pid)]

    async def until(self, count: int, limit_s: float = 60.0, gone: int | None = None) -> float:
        """Wait for so many engines, of which `gone` is none; how many seconds that took."""
        began = time.monotonic()
        while len(self.pids) != count or gone in self.pids:
            assert not self.failures, self.failures
            assert time.monotonic() - began < limit_s, (self.client.table(), gone)
            await asyncio.sleep(0.02)
        return time.monotonic() - began


@asynccontextmanager
async def ray_fleet(cluster: Any, config: EngineConfig, **options: object) -> AsyncIterator[RayFleet]:
    """With `ray_min` engines up."""
    ray = RayConfig(**{"ray": cluster.address, "ray_up_s": 0.0, "ray_down_s": 0.0, **options})  # type: ignore[arg-type]
    serve = ServeConfig(engine=config, ray=ray)
    server = for_ray(serve.server)
    assert server.listen_engines is not None
    gate = GateConfig.of(server.listen_engines, server.engine_key, None, None)
    client = FleetClient.start(config, num_replicas=0, gate=gate)
    await client.connect()
    fleet = RayFleet(client, RayFront(serve, server), str(server.engine_key))
    fleet.ray.begin(client, fleet.failures.append)
    try:
        await fleet.until(ray.ray_min)
        yield fleet
    finally:
        await client.close(0.1)
        await fleet.ray.close()


class Load:
    """Streams that follow one another, each compared with what it was without a disturbance."""

    def __init__(self, fleet: RayFleet, *, num_streams: int = 8, seed: int = 5) -> None:
        self._fleet = fleet
        self._num_streams = num_streams
        rng = random.Random(seed)
        kinds = (
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.9, ignore_eos=True),
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, presence_penalty=1.5, ignore_eos=True),
        )
        self._prompts = [[rng.randrange(1, 200) for _ in range(20 + at)] for at in range(num_streams)]
        self._params = [kinds[at % len(kinds)] for at in range(num_streams)]
        self._last_id = 0
        self.golden: list[list[int]] = []
        self.num_done = 0
        self.num_moved = 0  # of them, that went on in another engine
        self._stop = asyncio.Event()

    def submit(self, at: int) -> tuple[int, Any]:
        self._last_id += 1
        submit = Submit(self._last_id, self._prompts[at], self._params[at], seed=at)
        return self._last_id, self._fleet.client.submit(submit)

    async def record(self) -> None:
        """What the answers are while nothing happens."""
        streams = [self.submit(at)[1] for at in range(self._num_streams)]
        self.golden = [(await rest(stream))[0] for stream in streams]
        assert [len(each) for each in self.golden] == [NUM_TOKENS] * self._num_streams

    async def _follow(self, at: int) -> None:
        while not self._stop.is_set():
            try:
                id, stream = self.submit(at)
            except EngineError:  # no engine at this moment: a client would come again
                await asyncio.sleep(0.05)
                continue
            tokens, last = await rest(stream)
            assert (last.finish, last.error) == ("length", None)
            assert tokens == self.golden[at], f"stream {at} differs after {self.num_done} that were equal"
            self.num_done += 1
            routed = self._fleet.client._routed.get(id)
            self.num_moved += routed is not None and routed.why.startswith("another engine had it first")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Under way until the block ends; then all that have begun are read to their ends."""
        tasks = [asyncio.create_task(self._follow(at)) for at in range(self._num_streams)]
        try:
            yield
        finally:
            self._stop.set()
            async with asyncio.timeout(120):
                await asyncio.gather(*tasks)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    """True unless it has ended; one whose parent has not asked yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def engines_here() -> set[int]:
    """Processes of engines that joined whatever front and were started by this Python's installation."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0] == sys.executable.encode() and b"headway.cli.join_child" in words:
                found.add(int(path.parent.name))
    return {pid for pid in found if is_there(pid)}


async def until_gone(pids: set[int] | list[int], limit_s: float) -> float:
    began = time.monotonic()
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() - began < limit_s, f"processes {left} are still there after {limit_s:g} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def lose_store(cluster: Any, fleet: RayFleet) -> None:
    """Kill what the cluster keeps its knowledge in, under load; then start it again, from what it has kept."""
    load = Load(fleet)
    await load.record()
    engine, other = fleet.pids[:2]
    async with load.running():
        gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
        cluster.head_node.kill_gcs_server()
        assert not is_there(gcs)
        num_done = load.num_done
        while load.num_done < num_done + 16:  # streams go on
            await asyncio.sleep(0.02)
        # Keepers go on as well: each brings its engine back without Ray.
        began = time.monotonic()
        kill(engine)
        await fleet.until(3, BACK_S, gone=engine)
        alone_s = time.monotonic() - began
        cluster.head_node.start_gcs_server()
        # With the store back, Ray brings keepers back again.
        began = time.monotonic()
        keeper = parent_of(other)
        kill(keeper)
        orphan_s = await until_gone([other], ORPHAN_S)
        await fleet.until(3, BACK_S, gone=other)
        back_s = time.monotonic() - began
    print(
        f"\n  {load.num_done} streams equal; an engine back after {alone_s:.1f} s without the store; with it again "
        f"a keeper after {back_s:.1f} s, no engine left after {orphan_s:.2f} s"
    )
