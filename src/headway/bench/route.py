"""What choosing a replica costs a front: seconds of a choice and bytes of the index, by replicas and prompt length."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from headway.bench.console import print_json, print_table
from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.cluster.routes._route import Route, load_route
from headway.engine.client import EngineInfo, Submit
from headway.engine.holder import RequestHolder
from headway.engine.messages import KEY_BYTES
from headway.engine.published import Published
from headway.errors import ConfigError
from headway.kv.prefix import chain_keys, chain_seed
from headway.values.params import SamplingParams

BLOCK = 16
REPLICAS, BLOCKS = (8, 64, 256, 1000), (16, 250, 1000)
_CHOICES = 40
_KEYS = 100_000  # in the index whose memory is measured


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the table."""

    replicas: int
    blocks: int
    microseconds: float  # median of a choice, keys of the prompt included


def run(*, route: str = "cost", seed: int = 0, as_json: bool = False) -> int:
    """Print what a choice takes, and what a key takes in an index of as many holders."""
    rows = [measure(load_route(route), replicas, blocks, seed) for replicas in REPLICAS for blocks in BLOCKS]
    sizes = {replicas: round(bytes_per_key(replicas, seed)) for replicas in REPLICAS}
    if as_json:
        choices = [{"replicas": row.replicas, "blocks": row.blocks, "us": round(row.microseconds, 1)} for row in rows]
        print_json({"route": route, "choices": choices, "bytes_per_key": sizes})
        return 0
    cells = [[str(row.replicas), str(row.blocks), row.microseconds, 1e6 / row.microseconds] for row in rows]
    print_table(["replicas", "blocks of the prompt", "us a choice", "choices a second"], cells)
    print_table(["replicas", "bytes of the index for a key"], [[str(name), size] for name, size in sizes.items()])
    return 0


def measure(route: Route, num_replicas: int, num_blocks: int, seed: int) -> Choice:
    """Choices for prompts whose first half a few replicas hold."""
    if num_replicas < 1 or num_blocks < 1:
        raise ConfigError(f"{num_replicas} replicas and {num_blocks} blocks; allowed: 1 or more of each")
    rng, index = random.Random(seed), HolderIndex()
    info = EngineInfo("m", 1 << 30, 1 << 20, BLOCK, 1 << 20, 256)
    replicas = [_replica(number, info, rng) for number in range(num_replicas)]
    prompts = [[rng.randrange(1 << 20) for _ in range(BLOCK * num_blocks)] for _ in range(_CHOICES // 4)]
    for tokens in prompts:
        half = chain_keys(tokens[: len(tokens) // 2], BLOCK, chain_seed("", "", "", b""))
        for number in rng.sample(range(num_replicas), min(3, num_replicas)):
            index.change(number, [key[:KEY_BYTES] for key in half], ())
    spent: list[float] = []
    for id in range(_CHOICES):
        submit = Submit(id, prompts[id % len(prompts)], SamplingParams())
        start = time.perf_counter()
        route.choose(submit, replicas, index)
        spent.append(time.perf_counter() - start)
    return Choice(num_replicas, num_blocks, median(spent) * 1e6)


def bytes_per_key(num_replicas: int, seed: int, num_keys: int = _KEYS) -> float:
    """Of an index in which each key has one or two holders."""
    rng = random.Random(seed)
    tracemalloc.start()
    try:
        before, index = tracemalloc.get_traced_memory()[0], HolderIndex()
        for _ in range(num_keys):
            key = [rng.randbytes(KEY_BYTES)]
            for number in _few(rng, num_replicas):
                index.change(number, key, ())
        return (tracemalloc.get_traced_memory()[0] - before) / num_keys
    finally:
        tracemalloc.stop()


def _few(rng: random.Random, num_replicas: int) -> Sequence[int]:
    return rng.sample(range(num_replicas), min(num_replicas, rng.choice((1, 1, 1, 2))))


class _Facts(RequestHolder):
    """An engine of which only facts are asked."""

    def __init__(self, name: str, info: EngineInfo) -> None:
        self.name = name
        self.info = info


def _replica(number: int, info: EngineInfo, rng: random.Random) -> Replica:
    replica = Replica(number, _Facts(str(number), info))
    replica.take(Published(num_running=rng.randrange(20), num_prefill=rng.randrange(20_000)))
    return replica
