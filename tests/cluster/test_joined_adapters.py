"""Adapters that are loaded at run time and engines that joined: all of them get them, and requests wait for theirs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from adapter_files import random_adapter_files
from echo_join import killed
from echo_streams import rest
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.join import JoinConfig
from headway.cluster.joined import JoinedEngine
from headway.cluster.spawn import start_joining
from headway.config import EngineConfig
from headway.engine.client import EngineInfo, Submit
from headway.engine.messages import AdaptersNow, Command, Joining, LoadAdapter, UnloadAdapter
from headway.engine.streams import OutputStream
from headway.errors import RequestError
from headway.values.params import SamplingParams
from joined_fleet import port_of, until
from tiny_dir import tiny_options, write_tiny_model

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
INFO = EngineInfo("echo", 512, 320, 16, 64, 8)


def fleet(config: EngineConfig) -> FleetClient:
    return FleetClient.start(config, num_replicas=0, gate=GateConfig.of("127.0.0.1:0", None, None, None))


async def test_every_engine_that_joined_gets_what_is_loaded_and_so_do_those_that_join_later(tmp_path: Path) -> None:
    spec = write_tiny_model(tmp_path / "model")
    path = random_adapter_files(tmp_path / "adapter", spec, 1, size=0.7)
    config = EngineConfig.of(**tiny_options(tmp_path / "model"))
    client = fleet(config)
    await client.connect()
    join = f"127.0.0.1:{port_of(client)}"
    with killed([start_joining(config, JoinConfig(join=join, name=name)) for name in "ab"]) as processes:
        try:
            await until(client, 2)
            with pytest.raises(RequestError, match="nothing was changed"):
                await client.load_adapter("x", str(tmp_path))
            await client.load_adapter("x", str(path))
            digest = client.info.adapters["x"]
            tokens, _ = await rest(client.submit(Submit(1, [65, 66, 67], PARAMS, adapter="x")))
            plain, _ = await rest(client.submit(Submit(2, [65, 66, 67], PARAMS)))
            assert tokens != plain
            processes.append(start_joining(config, JoinConfig(join=join, name="late")))
            await until(client, 3)
            late = next(each.engine for each in client.replicas if each.engine.name == "late")
            began = time.monotonic()
            while late.info is None or late.info.adapters != {"x": digest}:
                assert time.monotonic() - began < 10.0
                await asyncio.sleep(0.01)
            for name in "ab":
                await client.drain(name, 0.0)
            again, last = await rest(client.submit(Submit(3, [65, 66, 67], PARAMS, adapter="x")))
            assert (again, last.error) == (tokens, None)
            assert client.num_restarts == 0, "no connection was dropped"
            await client.unload_adapter("x")
            assert late.info.adapters == {}
        finally:
            await client.close(0.1)


class Link:
    """A connection whose other end is the test."""

    where, num_pending = "here", 0

    def __init__(self) -> None:
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def loads(self) -> list[LoadAdapter]:
        return [each for each in self.sent if isinstance(each, LoadAdapter)]

    def ids(self) -> list[int]:
        return [each.id for each in self.sent if isinstance(each, Submit)]


async def rejoined(num_engines: int) -> tuple[FleetClient, JoinedEngine, Link, list[Link], list[OutputStream]]:
    """Engines with an adapter; the first one had a request by it, and has joined anew as a process without it."""
    client = fleet(EngineConfig.of(model="echo"))
    links = [Link() for _ in range(num_engines)]
    engines = [client.join(link, Joining(f"e{at}", f"i{at}", 1, INFO)) for at, link in enumerate(links)]
    loading = asyncio.create_task(client.load_adapter("x", "/a"))
    for engine, link in zip(engines, links, strict=True):
        while not link.loads():
            await asyncio.sleep(0)
        engine.take_message(link, AdaptersNow(link.loads()[0].ticket, {"x": "digest"}))
    await loading
    for engine, link in zip(engines[1:], links[1:], strict=True):
        engine.lost(link, "a test", is_crash=False)  # so that the first one gets the request
    streams = [client.submit(Submit(1, [65], PARAMS, adapter="x"))]
    assert links[0].ids() == [1]
    engines[0].lost(links[0], "a test", is_crash=False)
    again = Link()
    assert client.join(again, Joining("e0", "anew", 2, INFO)) is engines[0]
    for at in range(1, num_engines):
        links[at] = Link()
        client.join(links[at], Joining(f"e{at}", f"i{at}", 1, replace(INFO, adapters={"x": "digest"})))
    return client, engines[0], again, links[1:], streams


async def test_requests_wait_until_an_engine_that_joined_anew_has_their_adapter() -> None:
    client, engine, link, _, _ = await rejoined(1)
    (load,) = link.loads()
    assert (load.name, load.path, load.digest) == ("x", "/a", "digest")
    assert client.info.adapters == {"x": "digest"}, "a request that names it is not refused meanwhile"
    client.submit(Submit(2, [65], PARAMS, adapter="x"))
    client.submit(Submit(3, [65], PARAMS))
    assert link.ids() == [3]
    engine.take_message(link, AdaptersNow(load.ticket, {"x": "digest"}))
    assert link.ids() == [3, 1, 2]


async def test_requests_go_elsewhere_from_an_engine_that_lacks_their_adapter() -> None:
    _, engine, link, (other,), _ = await rejoined(2)
    engine.take_message(link, AdaptersNow(link.loads()[0].ticket, {}, "it has changed"))
    assert (link.ids(), other.ids()) == ([], [1])


async def test_requests_whose_adapter_no_engine_has_any_more_end_and_say_so() -> None:
    client, engine, link, _, (stream,) = await rejoined(1)
    engine.take_message(link, AdaptersNow(link.loads()[0].ticket, {}, "it has changed"))
    _, last = await rest(stream)
    assert last.finish == "error"
    assert "there is no adapter 'x'" in (last.error or "")
    assert link.ids() == []
    with pytest.raises(RequestError, match="there is no adapter"):
        client.submit(Submit(2, [65], PARAMS, adapter="x"))


async def test_an_adapter_is_not_unloaded_while_an_engine_reads_it() -> None:
    client, engine, link, _, (stream,) = await rejoined(1)
    client.abort(1)
    await rest(stream)
    unloading = asyncio.create_task(client.unload_adapter("x"))
    await asyncio.sleep(0.1)
    assert not unloading.done()
    engine.take_message(link, AdaptersNow(link.loads()[0].ticket, {"x": "digest"}))
    while not isinstance(unload := link.sent[-1], UnloadAdapter):
        await asyncio.sleep(0.01)
    engine.take_message(link, AdaptersNow(unload.ticket, {}))
    await unloading
    assert client.info.adapters == {}


async def test_an_engine_that_joins_in_the_middle_of_a_load_gets_it_too() -> None:
    client, (first, late) = fleet(EngineConfig.of(model="echo")), (Link(), Link())
    engine = client.join(first, Joining("e", "i", 1, INFO))
    loading = asyncio.create_task(client.load_adapter("x", "/a"))
    while not first.loads():
        await asyncio.sleep(0)
    client.join(late, Joining("late", "late", 1, INFO))
    engine.take_message(first, AdaptersNow(first.loads()[0].ticket, {"x": "digest"}))
    await loading
    assert [each.digest for each in late.loads()] == ["digest"]
    assert len(first.loads()) == 1
