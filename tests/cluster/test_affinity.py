"""Real engines on a tiny model: requests reach the replica that holds their prefix, and the index knows how much."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headway.cluster.client import FleetClient
from headway.cluster.routes._route import new_tokens
from headway.config import EngineConfig
from headway.engine.client import Output, Submit
from headway.values.params import SamplingParams
from tiny_dir import tiny_options, write_tiny_model

NUM_PREFIXES, BLOCK = 8, 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return EngineConfig.of(**tiny_options(folder))


@asynccontextmanager
async def fleet(config: EngineConfig, count: int = 3) -> AsyncIterator[FleetClient]:
    client = FleetClient.start(config, num_replicas=count)
    await client.connect()
    try:
        await client.ready()
        yield client
    finally:
        await client.close(1.0)


async def ask(client: FleetClient, submit: Submit) -> tuple[list[int], Output]:
    tokens: list[int] = []
    async for output in client.submit(submit):
        tokens += output.tokens
    return tokens, output


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 200) for _ in range(rng.randrange(40, 200))] for _ in range(NUM_PREFIXES)]


async def test_what_the_index_predicts_is_what_the_engine_finds(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prefixes, rng, num_hits = prompts(0), random.Random(1), 0
    async with fleet(config) as client:
        for id in range(1, 61):
            prefix = prefixes[rng.randrange(NUM_PREFIXES)]
            submit = Submit(id, prefix + [rng.randrange(1, 200) for _ in range(rng.randrange(1, 40))], params)
            predicted = new_tokens(submit, client.replicas, client._index)
            best = min(predicted)
            _, last = await ask(client, submit)
            home = client._was_at[id].number
            assert len(submit.tokens) - predicted[home] == last.cached_tokens
            assert predicted[home] == best, "an idle replica that holds more was passed over"
            num_hits += last.cached_tokens > 0
            await asyncio.sleep(0.01)  # news of blocks comes behind the last token
        assert num_hits >= 60 - NUM_PREFIXES - 1


async def test_tenants_share_no_prefix_whatever_the_route(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = prompts(2)[0]
    async with fleet(config, 2) as client:
        await ask(client, Submit(1, prompt, params, namespace=b"one"))
        _, last = await ask(client, Submit(2, prompt, params, namespace=b"two"))
        assert last.cached_tokens == 0
        _, last = await ask(client, Submit(3, prompt, params, namespace=b"one"))
        assert last.cached_tokens > 0


async def test_sampled_answers_go_on_elsewhere_with_the_same_tokens(config: EngineConfig) -> None:
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
    async with fleet(config, 2) as client:
        golden = [await ask(client, submit) for submit in submits]
        asking = [asyncio.create_task(ask(client, submit)) for submit in submits]
        while not all(each.engine.entries for each in client.replicas):
            await asyncio.sleep(0)
        while not any(entry.tokens for entry in client.replicas[0].engine.entries.values()):
            await asyncio.sleep(0)
        os.kill(client.replicas[0].engine.pid or 0, signal.SIGKILL)
        got = await asyncio.gather(*asking)
        assert client.num_restarts == 1
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in golden]
