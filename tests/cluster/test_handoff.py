"""Real engines on a tiny model: one computes prompts, another goes on, and no token shows it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headway.cluster.client import FleetClient
from headway.cluster.handoff import can_fetch
from headway.cluster.joined import JoinedEngine
from headway.cluster.replica import split
from headway.config import EngineConfig
from headway.engine.client import EngineInfo, Output, Stats, Submit
from headway.engine.holder import RequestHolder
from headway.engine.messages import GetStats, StatsReply
from headway.engine.supervisor import SupervisedEngine
from headway.errors import ConfigError
from headway.values.params import SamplingParams
from submits import submits
from tiny_dir import tiny_options, write_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return EngineConfig.of(**tiny_options(folder, speculation="off"))


@asynccontextmanager
async def fleet(config: EngineConfig, role: str = "prefill,decode") -> AsyncIterator[FleetClient]:
    config = replace(config, scheduler=replace(config.scheduler, role=role))
    client = FleetClient.start(config, num_replicas=len(role.split(",")))
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


async def stats_of(client: FleetClient, number: int) -> Stats:
    reply = await client._question(client.replicas[number].engine, GetStats)
    assert isinstance(reply, StatsReply)
    return reply.stats


async def settled(client: FleetClient, number: int) -> Stats:
    """Numbers of a replica once it holds nothing for others."""
    while True:
        stats = await stats_of(client, number)
        if stats.blocks_free == stats.blocks_total and not stats.running:
            return stats
        await asyncio.sleep(0.01)


async def test_answers_of_two_engines_equal_those_of_one(config: EngineConfig) -> None:
    async with fleet(config, "both") as client:
        wanted = [await ask(client, submit) for submit in submits()]
    async with fleet(config) as client:
        got = await asyncio.gather(*(ask(client, submit) for submit in submits()))
        for submit, (one, two) in zip(submits(), zip(wanted, got, strict=True), strict=True):
            assert one[0] == two[0], submit
            assert one[1].finish == two[1].finish
            assert two[1].tokens_recomputed == 0
            assert two[1].cached_tokens < len(submit.tokens)
        prefill, decode = await settled(client, 0), await settled(client, 1)
    num_long = sum(len(submit.tokens) for submit, (tokens, _) in zip(submits(), got, strict=True) if len(tokens) > 1)
    assert decode.tokens_from_peers + decode.tokens_cached >= num_long
    assert decode.failed_loads == 0
    assert prefill.tokens_generated == len(submits()), "one token of each"
    assert decode.tokens_computed <= sum(len(tokens) for tokens, _ in got), "no prompt is computed again"


async def test_usage_says_what_the_cache_had(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with fleet(config) as client:
        first = await ask(client, Submit(1, list(range(1, 101)), params))
        second = await ask(client, Submit(2, list(range(1, 101)), params))
    assert first[0] == second[0]
    assert (first[1].cached_tokens, second[1].cached_tokens) == (0, 96)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_killed_engine_of_either_kind_costs_no_token_and_leaves_no_file(
    config: EngineConfig, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    params = SamplingParams(max_tokens=60, temperature=0.8, ignore_eos=True)
    asked = [Submit(id, [id, *range(1, 90)], params, seed=id) for id in range(1, 9)]
    async with fleet(config, "both") as client:
        wanted = [(await ask(client, submit))[0] for submit in asked]
    async with fleet(config, "prefill,decode,decode") as client:
        tasks = [asyncio.create_task(ask(client, submit)) for submit in asked]
        while not any(each.engine.entries for each in client.replicas[1:]):
            await asyncio.sleep(0)
        os.kill(client.replicas[number].engine.pid or 0, signal.SIGKILL)
        got = await asyncio.gather(*tasks)
    assert [tokens for tokens, _ in got] == wanted
    assert {output.finish for _, output in got} == {"length"}
    assert list(tmp_path.iterdir()) == []


async def test_without_the_other_kind_an_engine_does_all(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    async with fleet(config, "both") as client:
        wanted, _ = await ask(client, Submit(1, list(range(1, 50)), params))
    for role in ("prefill", "decode", "prefill,prefill"):
        async with fleet(config, role) as client:
            assert (await ask(client, Submit(1, list(range(1, 50)), params)))[0] == wanted


async def test_a_request_aborted_between_the_engines_leaves_no_block(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    async with fleet(config) as client:
        for id in range(1, 12):
            stream = client.submit(Submit(id, [id, *range(1, 90)], params))
            num_tokens = len((await anext(stream)).tokens) if id % 3 else 0
            if id % 2:
                client.abort(id)
                async for output in stream:
                    num_tokens += len(output.tokens)
                    last = output
                # An answer that was complete before its abort came is no aborted one.
                assert last.finish == ("length" if num_tokens == params.max_tokens else "abort")
            else:
                await stream.aclose()
        await settled(client, 0)
        await settled(client, 1)


async def test_an_abort_that_crosses_the_end_of_the_first_part_is_an_abort(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    async with fleet(config) as client:
        stream = client.submit(Submit(1, list(range(1, 91)), params))

        def abort() -> None:  # within the message that has the only token of this part and its end
            stream.listen(None)
            client.abort(1)

        stream.listen(abort)
        outputs = [output async for output in stream]
        assert (sum(len(each.tokens) for each in outputs), outputs[-1].finish) == (1, "abort")
        await settled(client, 0)
        await settled(client, 1)


async def test_answers_that_share_a_prompt_stay_together(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.9, n=3, ignore_eos=True)
    first = Submit(1, list(range(1, 50)), params, seed=1, group=1)
    group = [first, *(replace(first, id=id, seed=id, parent=1) for id in (2, 3))]
    answers = []
    for role in ("both", "prefill,decode"):
        async with fleet(config, role) as client:
            answers.append([tokens for tokens, _ in await asyncio.gather(*(ask(client, each) for each in group))])
    assert answers[0] == answers[1]


def test_roles_are_given_to_replicas_in_order() -> None:
    config = EngineConfig.of(role="prefill,decode,both")
    assert [each.scheduler.role for each in split(config, 3)] == ["prefill", "decode", "both"]
    with pytest.raises(ConfigError, match="3 roles"):
        split(config, 2)
    with pytest.raises(ConfigError, match="allowed: prefill, decode, both"):
        EngineConfig.of(role="prefil")


async def test_a_restarted_engine_takes_its_prefix_from_disk(config: EngineConfig, tmp_path: Path) -> None:
    cache = replace(config.cache, kv_disk_bytes=1 << 24, kv_disk_dir=str(tmp_path / "kv"))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    async with fleet(replace(config, cache=cache), "both") as client:
        first, _ = await ask(client, Submit(1, list(range(1, 101)), params))
        while not list((tmp_path / "kv").glob("*/*.kv")) or (await stats_of(client, 0)).running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        os.kill(client.replicas[0].engine.pid or 0, signal.SIGKILL)
        while not client.num_restarts or not client.replicas[0].engine.takes_requests:
            await asyncio.sleep(0.01)
        again, output = await ask(client, Submit(2, list(range(1, 101)), params))
        assert (again, output.cached_tokens) == (first, 96)
        assert (await stats_of(client, 0)).tokens_from_tier == 96


def _reached_at(fetch_at: str, joined_from: str | None = None) -> RequestHolder:
    """An engine of the server, or one that joined from an address."""
    engine = object.__new__(SupervisedEngine if joined_from is None else JoinedEngine)
    engine.info = replace(EngineInfo("m", 64, 50, 4, 64, 4), fetch_at=fetch_at)
    if joined_from is not None:
        engine.where = joined_from
    return engine


OWN, OWN_TLS, NEAR = "unix:a,tcp:10.0.0.1:7", "unix:a,tls:front:7", "unix:a,tcp:127.0.0.1:7"
FAR, HERE = "10.0.0.2:4000", "127.0.0.1:4000"


@pytest.mark.parametrize(
    ("source", "goal", "is_reached"),
    [
        ((NEAR,), ("unix:b",), True),
        ((OWN,), ("tcp:10.0.0.2:7", FAR), True),
        ((OWN_TLS,), ("tcp:10.0.0.2:7", FAR), True),
        ((NEAR,), ("tcp:10.0.0.2:7", FAR), False),  # no address of it is seen over there
        ((NEAR,), ("unix:b,tcp:127.0.0.1:9", HERE), True),
        (("tcp:10.0.0.2:7", FAR), (OWN,), True),
        (("tls:there:7", FAR), (OWN,), False),  # whose certificate a server's own engines cannot check
        (("nixl:10.0.0.2:7", FAR), (OWN,), True),
        (("tls:there:7", FAR), ("tls:elsewhere:7", FAR), True),
        (("", FAR), (OWN,), False),
        ((OWN,), ("", FAR), False),
        (("tcp:[fe80::1]:7", FAR), (OWN,), True),
        (("tcp:[::1]:7", FAR), (OWN,), False),
    ],
)
def test_who_fetches_from_whom(source: tuple[str, ...], goal: tuple[str, ...], is_reached: bool) -> None:
    assert can_fetch(_reached_at(*goal), _reached_at(*source)) is is_reached
