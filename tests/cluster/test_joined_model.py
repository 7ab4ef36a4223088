"""Real engines on a tiny model that join: a front that comes anew knows at once what they hold."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from echo_join import killed
from echo_streams import rest
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.join import JoinConfig
from headway.cluster.routes._route import new_tokens
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.mover import LOAD_LEASE_S
from headway.values.params import SamplingParams
from joined_fleet import port_of, until
from tiny_dir import tiny_options, write_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return EngineConfig.of(**tiny_options(folder))


async def open_front(config: EngineConfig, port: int = 0) -> FleetClient:
    gate = GateConfig.of(f"127.0.0.1:{port}", None, None, None)
    client = FleetClient.start(config, num_replicas=0, gate=gate)
    await client.connect()
    return client


def start(config: EngineConfig, client: FleetClient, count: int) -> list[JoiningProcess]:
    join = f"127.0.0.1:{port_of(client)}"
    return [start_joining(config, JoinConfig(join=join, name=f"tiny{at}")) for at in range(count)]


async def test_the_index_is_exact_within_a_second_of_a_reconnect(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    rng = random.Random(5)
    prompts = [[rng.randrange(1, 200) for _ in range(100)] for _ in range(6)]
    client = await open_front(config)
    with killed(start(config, client, 2)):
        try:
            await until(client, 2)
            for id, prompt in enumerate(prompts, 1):
                await rest(client.submit(Submit(id, prompt, params)))
            while len(client._index) < 6 * 6:
                await asyncio.sleep(0.005)
            before, port = dict(client._index._holders), port_of(client)
            names = {1 << each.number: each.engine.name for each in client.replicas}
            await client.close(0.1)
            client = await open_front(config, port)
            await until(client, 2)
            began = time.monotonic()
            while len(client._index) < len(before):
                assert time.monotonic() - began < 1.0
                await asyncio.sleep(0.005)
            again = {1 << each.number: each.engine.name for each in client.replicas}
            after = {key: again[bits] for key, bits in client._index._holders.items()}
            assert after == {key: names[bits] for key, bits in before.items()}
            for id, prompt in enumerate(prompts, 1):
                predicted = min(new_tokens(Submit(id, prompt, params), client.replicas, client._index))
                _, last = await rest(client.submit(Submit(id, prompt, params)))
                assert len(prompt) - predicted == last.cached_tokens > 0
        finally:
            await client.close(0.1)


async def test_sampled_answers_of_a_killed_engine_go_on_with_the_same_tokens(config: EngineConfig) -> None:
    kinds = (
        SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=120, temperature=1.0, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=120, temperature=0.8, presence_penalty=1.5, frequency_penalty=0.7, ignore_eos=True),
        SamplingParams(max_tokens=120, temperature=0.7, logprobs=2, ignore_eos=True),
    )
    rng = random.Random(3)
    submits = [
        Submit(id, [rng.randrange(1, 200) for _ in range(20 + id)], kinds[id % 4], seed=id) for id in range(1, 17)
    ]
    client = await open_front(config)
    with killed(start(config, client, 2)) as engines:
        try:
            await until(client, 2)
            golden = [(await rest(client.submit(each)))[0] for each in submits]
            asking = [asyncio.create_task(rest(client.submit(each))) for each in submits]
            gone = next(each.engine for each in client.replicas if each.engine.pid == engines[0].pid)
            while not any(entry.tokens for entry in gone.entries.values()):
                await asyncio.sleep(0)
            os.kill(engines[0].pid, signal.SIGKILL)
            assert [tokens for tokens, _ in await asyncio.gather(*asking)] == golden
            assert not gone.is_up
        finally:
            await client.close(0.1)


async def test_an_engine_that_joined_goes_on_as_soon_as_its_disk_has_answered(
    config: EngineConfig, tmp_path: Path
) -> None:
    cache = replace(config.cache, kv_disk_bytes=64 << 20, kv_disk_dir=str(tmp_path / "kv"))
    prompts = [[random.Random(seed).randrange(1, 200) for _ in range(200)] for seed in range(6)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    client = await open_front(config)
    try:
        rounds = []
        for first in (100, 200):  # the second one in another process
            with killed(start(replace(config, cache=cache), client, 1)) as engines:
                await until(client, 1)
                submits = [Submit(first + at, prompt, params) for at, prompt in enumerate(prompts)]
                async with asyncio.timeout(LOAD_LEASE_S * len(submits) / 2):  # what nothing wakes waits for its lease
                    rounds.append([await rest(client.submit(submit)) for submit in submits])
                engines[0].end()  # stores all it has
                await until(client, 0)
        assert [tokens for tokens, _ in rounds[0]] == [tokens for tokens, _ in rounds[1]]
        assert [last.cached_tokens for _, last in rounds[1]] == [192] * len(prompts)
    finally:
        await client.close(0.1)
