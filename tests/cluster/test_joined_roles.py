"""Real engines on a tiny model that join with roles: KV crosses between them, and no token shows what happens to it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import joined_fleet
from echo_join import killed
from echo_streams import rest
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.handoff import LetGo
from headway.cluster.handshake import certified
from headway.cluster.join import JoinConfig
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.config import EngineConfig
from headway.engine.client import Output, Stats, Submit
from headway.engine.messages import GetStats, StatsReply
from headway.values.params import SamplingParams
from joined_fleet import KEY, engine_of, port_of, until
from submits import submits
from tiny_dir import tiny_options, write_tiny_model

CERT, CERT_KEY = (str(Path(joined_fleet.__file__).parent / "tls" / name) for name in ("cert.pem", "key.pem"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return EngineConfig.of(**tiny_options(folder, speculation="off"))


@asynccontextmanager
async def roles(
    config: EngineConfig, *wanted: str, key: str | None = None, ways: str = "unix,tcp", own: str = ""
) -> AsyncIterator[tuple[FleetClient, list[JoiningProcess]]]:
    """A front with engines that joined it. `ways`: by which kind of address they may be reached."""
    alone = replace(config, scheduler=replace(config.scheduler, role=own or "both"))
    gate = GateConfig.of("127.0.0.1:0", key, None, certified(CERT, CERT_KEY, "") if ways == "tls" else None)
    client = FleetClient.start(alone, num_replicas=len(own.split(",")) if own else 0, gate=gate)
    await client.connect()
    started = [start(config, client, role, f"{role}{at}", key, ways) for at, role in enumerate(wanted)]
    with killed(started):
        try:
            await until(client, len(wanted) + len(client._own))
            for engine in client.joined():
                assert engine.info is not None
                addresses = [each for each in engine.info.fetch_at.split(",") if each.split(":")[0] in ways]
                engine.info = replace(engine.info, fetch_at=",".join(addresses))
            yield client, started
        finally:
            await client.close(0.1)


def start(
    config: EngineConfig, client: FleetClient, role: str, name: str, key: str | None, ways: str
) -> JoiningProcess:
    one = replace(config, scheduler=replace(config.scheduler, role=role))
    join = JoinConfig(join=f"127.0.0.1:{port_of(client)}", name=name, key=key)
    if ways == "tls":
        tls = {"tls_ca": CERT, "kv_tls_cert": CERT, "kv_tls_key": CERT_KEY}
        join = replace(join, join=f"localhost:{port_of(client)}", kv_listen="localhost:0", **tls)
    return start_joining(one, join)


async def golden(config: EngineConfig, asked: Sequence[Submit]) -> list[tuple[list[int], Output]]:
    """What an engine that does all answers."""
    async with roles(config, "both") as (client, _):
        return [await rest(client.submit(each)) for each in asked]


async def stats_of(client: FleetClient, process: JoiningProcess) -> Stats:
    reply = await client._question(engine_of(client, process), GetStats)
    assert isinstance(reply, StatsReply)
    return reply.stats


async def settled(client: FleetClient, process: JoiningProcess) -> Stats:
    """Numbers of an engine once it holds nothing for others."""
    while True:
        stats = await stats_of(client, process)
        if stats.blocks_free == stats.blocks_total and not stats.running:
            return stats
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("ways", ["unix", "tcp", "unix,tcp", "tls"])
async def test_answers_of_two_engines_that_joined_equal_those_of_one(config: EngineConfig, ways: str) -> None:
    wanted = await golden(config, submits())
    async with roles(config, "prefill", "decode", key=KEY, ways=ways) as (client, processes):
        got = await asyncio.gather(*(rest(client.submit(each)) for each in submits()))
        prefill, decode = [await settled(client, each) for each in processes]
        assert not any(each.claims for each in client.replicas)
    for submit, (tokens, last), (same, one) in zip(submits(), got, wanted, strict=True):
        assert tokens == same, submit
        assert (last.finish, last.tokens_recomputed) == (one.finish, 0)
    num_long = sum(len(submit.tokens) for submit, (tokens, _) in zip(submits(), got, strict=True) if len(tokens) > 1)
    assert decode.tokens_from_peers + decode.tokens_cached >= num_long
    assert (decode.failed_loads, prefill.tokens_generated) == (0, len(submits()))
    assert decode.tokens_computed <= sum(len(tokens) for tokens, _ in got), "no prompt is computed again"


async def test_kv_is_let_go_with_the_first_token_of_the_other_engine(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    async with roles(config, "prefill", "decode") as (client, (prefill, _)):
        async with asyncio.timeout(8):  # the lease is longer
            await rest(client.submit(Submit(1, list(range(1, 100)), params)))
            await settled(client, prefill)


async def test_kv_is_let_go_when_the_client_has_given_up(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    async with roles(config, "prefill", "decode") as (client, (prefill, decode)):
        os.kill(decode.pid, signal.SIGSTOP)
        stream = client.submit(Submit(1, list(range(1, 100)), params))
        await anext(stream)
        while 1 not in engine_of(client, decode).entries:
            await asyncio.sleep(0)
        await stream.aclose()
        async with asyncio.timeout(8):  # the lease is longer
            await settled(client, prefill)


def many(count: int = 8, max_tokens: int = 60) -> list[Submit]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
    return [Submit(id, [id, *range(1, 90)], params, seed=id) for id in range(1, count + 1)]


@pytest.mark.parametrize("gone", [0, 1])
async def test_an_engine_killed_in_the_middle_of_a_handoff_costs_no_token(config: EngineConfig, gone: int) -> None:
    wanted = await golden(config, many())
    async with roles(config, "prefill", "decode", "decode", ways="tcp") as (client, processes):
        asking = [asyncio.create_task(rest(client.submit(each))) for each in many()]
        decodes = [engine_of(client, each) for each in processes[1:]]
        while not any(entry.let_go is not None for each in decodes for entry in each.entries.values()):
            await asyncio.sleep(0)
        os.kill(processes[gone].pid, signal.SIGKILL)
        got = await asyncio.gather(*asking)
        for at, each in enumerate(processes):
            if at != gone:
                await settled(client, each)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    assert {last.finish for _, last in got} == {"length"}


async def test_without_a_decode_engine_the_one_that_keeps_the_kv_goes_on(config: EngineConfig) -> None:
    wanted = await golden(config, many())
    async with roles(config, "prefill", "decode") as (client, processes):
        decode = engine_of(client, processes[1])
        os.kill(processes[1].pid, signal.SIGSTOP)  # it gets requests and answers none
        asking = [asyncio.create_task(rest(client.submit(each))) for each in many()]
        while not all(isinstance(each.let_go, LetGo) for each in decode.entries.values()) or len(decode.entries) < 8:
            await asyncio.sleep(0.005)
        os.kill(processes[1].pid, signal.SIGKILL)
        got = await asyncio.gather(*asking)
        await settled(client, processes[0])
    assert [(tokens, last.finish) for tokens, last in got] == [(tokens, "length") for tokens, _ in wanted]


async def test_a_prefill_engine_that_stands_still_costs_no_token(config: EngineConfig) -> None:
    wanted = await golden(config, many(4))
    async with roles(config, "prefill", "decode", ways="tcp") as (client, processes):
        decode = engine_of(client, processes[1])
        asking = [asyncio.create_task(rest(client.submit(each))) for each in many(4)]
        while not any(entry.let_go is not None for entry in decode.entries.values()):
            await asyncio.sleep(0)
        os.kill(processes[0].pid, signal.SIGSTOP)
        got = await asyncio.gather(*asking)
    assert [(tokens, last.finish) for tokens, last in got] == [(tokens, "length") for tokens, _ in wanted]


async def test_kv_of_an_engine_with_another_key_is_computed_instead(config: EngineConfig) -> None:
    wanted = await golden(config, many(3))
    async with (
        roles(config, "prefill", key="another key of sixteen bytes") as (other, _),
        roles(config, "prefill", "decode", key=KEY) as (client, processes),
    ):
        prefill, there = engine_of(client, processes[0]), other.joined()[0].info
        assert prefill.info is not None
        assert there is not None
        prefill.info = replace(prefill.info, fetch_at=there.fetch_at)
        got = [await rest(client.submit(each)) for each in many(3)]
        stats = await settled(client, processes[1])
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    assert (stats.tokens_from_peers, stats.failed_loads) == (0, 3)


@pytest.mark.parametrize("pair", [("prefill",), ("decode",), ("prefill", "prefill"), ("both", "decode")])
async def test_without_the_other_kind_an_engine_does_all(config: EngineConfig, pair: tuple[str, ...]) -> None:
    wanted = await golden(config, many(3, 6))
    async with roles(config, *pair) as (client, _):
        assert [(await rest(client.submit(each)))[0] for each in many(3, 6)] == [tokens for tokens, _ in wanted]


async def test_engines_of_the_front_and_engines_that_joined_do_not_wait_for_each_other(config: EngineConfig) -> None:
    wanted = await golden(config, many(3))
    async with roles(config, "decode", own="prefill") as (client, _):
        got = await asyncio.gather(*(rest(client.submit(each)) for each in many(3)))
        assert (await client.stats()).failed_loads == 0
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]


async def test_the_table_says_who_has_which_role(config: EngineConfig) -> None:
    async with roles(config, "prefill", "decode") as (client, _):
        assert {(each["name"], each["role"]) for each in client.table()} == {
            ("prefill0", "prefill"),
            ("decode1", "decode"),
        }
