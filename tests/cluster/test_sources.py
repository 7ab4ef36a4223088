"""Engines that have little fetch prefixes from those that have them, where that is quicker; never is a token other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from echo_join import killed
from echo_streams import rest
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.index import HolderIndex
from headway.cluster.join import JoinConfig
from headway.cluster.replica import Replica
from headway.cluster.routes.round_robin import RoundRobinRoute
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.config import EngineConfig
from headway.control.costs import CostModel, CostWeights
from headway.engine.arrivals import ArrivedBlock
from headway.engine.client import Stats, Submit
from headway.engine.messages import GetStats, StatsReply
from headway.values.params import SamplingParams
from joined_fleet import engine_of, port_of, until
from moving import BLOCK, Moving
from tiny_dir import tiny_options, write_tiny_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * i) % 190 + 1 for i in range(200)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return EngineConfig.of(**tiny_options(folder, speculation="off"))  # computed tokens are counted


class LastRoute:
    """The replica with the highest number, whatever it holds."""

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        return max(replicas, key=lambda each: each.number), len(submit.tokens)


@asynccontextmanager
async def front(config: EngineConfig, route: object) -> AsyncIterator[FleetClient]:
    gate = GateConfig.of("127.0.0.1:0", None, None, None)
    client = FleetClient.start(config, num_replicas=0, gate=gate, route=route)  # type: ignore[arg-type]
    await client.connect()
    try:
        yield client
    finally:
        await client.close(0.1)


def start(config: EngineConfig, client: FleetClient, name: str, **more: object) -> JoiningProcess:
    more = {"kv_listen": "127.0.0.1:0", **more}
    return start_joining(config, JoinConfig(join=f"127.0.0.1:{port_of(client)}", name=name, **more))  # type: ignore[arg-type]


async def stats_of(client: FleetClient, process: JoiningProcess) -> Stats:
    reply = await client._question(engine_of(client, process), GetStats)
    assert isinstance(reply, StatsReply)
    return reply.stats


async def indexed(client: FleetClient, count: int) -> None:
    while len(client._index) < count:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("way", ["unix", "tcp"])
async def test_a_new_engine_fetches_the_prefix_that_another_one_has(config: EngineConfig, way: str) -> None:
    async with front(config, LastRoute()) as client:
        with killed([start(config, client, "old")]) as processes:
            await until(client, 1)
            wanted = await rest(client.submit(Submit(1, PROMPT, PARAMS)))
            await indexed(client, 12)
            processes.append(start(config, client, "new"))
            await until(client, 2)
            old = engine_of(client, processes[0])
            assert old.info is not None
            old.info = replace(old.info, fetch_at=next(a for a in old.info.fetch_at.split(",") if a.startswith(way)))
            got = await rest(client.submit(Submit(2, PROMPT, PARAMS)))
            stats = await stats_of(client, processes[1])
    assert got[0] == wanted[0]
    assert got[1].cached_tokens == stats.tokens_from_peers == 192
    assert (stats.tokens_computed, stats.failed_loads) == (8 + 7, 0)


async def test_an_engine_that_names_no_place_for_kv_neither_gives_nor_gets(config: EngineConfig) -> None:
    async with front(config, LastRoute()) as client:
        with killed([start(config, client, "old", kv_listen=None)]) as processes:
            await until(client, 1)
            wanted, _ = await rest(client.submit(Submit(1, PROMPT, PARAMS)))
            await indexed(client, 12)
            processes.append(start(config, client, "new"))
            await until(client, 2)
            assert (await rest(client.submit(Submit(2, PROMPT, PARAMS))))[0] == wanted
            stats = await stats_of(client, processes[1])
    assert (stats.tokens_from_peers, stats.failed_loads) == (0, 0)


async def test_a_request_that_goes_on_elsewhere_fetches_what_living_engines_have(config: EngineConfig) -> None:
    params = replace(PARAMS, max_tokens=150)
    async with front(config, LastRoute()) as client:
        with killed([start(config, client, "one")]) as processes:
            await until(client, 1)
            wanted, _ = await rest(client.submit(Submit(1, PROMPT, params)))
            await indexed(client, 12)
            for name in ("two", "three"):  # the last one gets the request, the second last goes on with it
                processes.append(start(config, client, name))
                await until(client, len(processes))
            stream = client.submit(Submit(2, PROMPT, params))
            last = engine_of(client, processes[-1])
            while not last.entries[2].tokens:
                await asyncio.sleep(0)
            os.kill(processes[-1].pid, signal.SIGKILL)
            got, output = await rest(stream)
            stats = await stats_of(client, processes[1])
    assert (got, output.finish) == (wanted, "length")
    assert stats.tokens_from_peers >= 192


async def test_answers_are_the_same_while_engines_that_others_fetch_from_are_killed(config: EngineConfig) -> None:
    asked = [Submit(id, [*PROMPT[: 40 * (id % 5)], id, *PROMPT], PARAMS) for id in range(1, 25)]
    async with front(config, RoundRobinRoute()) as client:
        with killed([start(config, client, f"e{at}") for at in range(3)]) as processes:
            await until(client, 3)
            wanted = {each.id: (await rest(client.submit(each)))[0] for each in asked}
            asking = [asyncio.create_task(rest(client.submit(replace(each, id=each.id + 100)))) for each in asked]
            await asyncio.sleep(0)
            os.kill(processes[0].pid, signal.SIGKILL)
            got = await asyncio.gather(*asking)
    assert [tokens for tokens, _ in got] == [wanted[each.id] for each in asked]


class SlowPeer:
    """Gives blocks after a while by the timer of the engine that asks."""

    def __init__(self, each_s: float) -> None:
        self.now, self.each_s = 0.0, each_s
        self.wake: Callable[[], None] = lambda: None
        self.num_asked = 0
        self._arrivals: deque[ArrivedBlock] = deque()

    def timer(self) -> float:
        return self.now

    def load(self, ticket: int, keys: Sequence[bytes], at: str = "") -> None:
        self.num_asked += 1
        self.now += self.each_s * len(keys)
        self._arrivals.append(ArrivedBlock(ticket, len(keys), None))

    def take(self, most: int) -> list[ArrivedBlock]:
        return [self._arrivals.popleft() for _ in range(min(most, len(self._arrivals)))]

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def cancel(self, ticket: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("each_s", "least", "most"), [(1e-4, 20, 20), (0.1, 2, 5)])
def test_blocks_are_fetched_if_that_has_been_quicker_than_computing(each_s: float, least: int, most: int) -> None:
    peer = SlowPeer(each_s)
    engine = Moving(peers=peer)
    engine.mover._timer = peer.timer
    engine.scheduler.state.costs = CostModel(CostWeights(tokens=0.1))
    for id in range(1, 21):
        prompt = [id] * (10 * BLOCK + 1)
        engine.add(id, prompt, fetch_from="tcp:x", fetch_tokens=10 * BLOCK)
        engine.run(id)
        assert engine.is_right(id, prompt)
    assert least <= peer.num_asked <= most
    assert engine.num_free == 64


@asynccontextmanager
async def own(config: EngineConfig, num_replicas: int, **gate: object) -> AsyncIterator[FleetClient]:
    """A server's own engines, and perhaps a gate beside them."""
    more = {"gate": GateConfig("127.0.0.1", 0, **gate)} if gate else {}  # type: ignore[arg-type]
    client = FleetClient.start(config, num_replicas=num_replicas, route=RoundRobinRoute(), **more)  # type: ignore[arg-type]
    await client.connect()
    try:
        await client.ready()
        yield client
    finally:
        await client.close(0.1)


async def asked_of(client: FleetClient, number: int) -> Stats:
    reply = await client._question(client.replicas[number].engine, GetStats)
    assert isinstance(reply, StatsReply)
    return reply.stats


async def test_replicas_of_one_server_fetch_from_each_other(config: EngineConfig) -> None:
    async with own(config, 2) as client:
        wanted, _ = await rest(client.submit(Submit(1, PROMPT, PARAMS)))
        await indexed(client, 12)
        got, output = await rest(client.submit(Submit(2, PROMPT, PARAMS)))
        found = [await asked_of(client, number) for number in range(2)]
        assert client._routed[1].replica != client._routed[2].replica
    assert got == wanted
    assert output.cached_tokens == sum(each.tokens_from_peers for each in found) == 192
    assert sum(each.failed_loads for each in found) == 0


async def test_the_only_engine_of_a_server_lets_nobody_fetch(config: EngineConfig) -> None:
    async with own(config, 1) as client:
        assert client.replicas[0].engine.info is not None
        assert client.replicas[0].engine.info.fetch_at == ""


@pytest.mark.parametrize("first", ["own", "joined"])
@pytest.mark.parametrize("way", ["unix", "tcp"])
async def test_own_engines_and_those_that_joined_fetch_from_each_other(
    config: EngineConfig, first: str, way: str
) -> None:
    key = "a key of a fleet, long enough"
    async with own(config, 1, key=key.encode()) as client:
        with killed([start(config, client, "guest", key=key)]):
            await until(client, 2)
            numbers = {"own": 0, "joined": 1}
            for each in client.replicas:
                assert each.engine.info is not None
                addresses = each.engine.info.fetch_at.split(",")
                each.engine.info = replace(
                    each.engine.info, fetch_at=next(address for address in addresses if address.startswith(way))
                )
            if first == "joined":  # round robin begins with the first one
                await rest(client.submit(Submit(9, [1], PARAMS)))
            wanted, _ = await rest(client.submit(Submit(1, PROMPT, PARAMS)))
            await indexed(client, 12)
            got, output = await rest(client.submit(Submit(2, PROMPT, PARAMS)))
            stats = await asked_of(client, 1 - numbers[first])
    assert got == wanted
    assert output.cached_tokens == stats.tokens_from_peers == 192


async def test_a_replica_whose_kv_cannot_be_had_is_a_miss(config: EngineConfig) -> None:
    async with own(config, 2) as client:
        for each in client.replicas:
            assert each.engine.info is not None
            each.engine.info = replace(each.engine.info, fetch_at="unix:none-is-here")
        wanted, _ = await rest(client.submit(Submit(1, PROMPT, PARAMS)))
        await indexed(client, 12)
        got, output = await rest(client.submit(Submit(2, PROMPT, PARAMS)))
        found = [await asked_of(client, number) for number in range(2)]
    assert got == wanted
    assert (output.cached_tokens, sum(each.failed_loads for each in found)) == (0, 1)
