"""What reaches the port for engines and should not: it is refused or dropped, and no engine or request notices."""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echo_join
from echo_join import killed, start_echo
from echo_streams import expected, rest
from headway.cluster import gate as gates
from headway.cluster import handshake
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.handshake import ANSWER_BYTES, HELLO_BYTES, Hello, JoinRefused, admit_engine, greet_front, proof
from headway.cluster.join import REFUSED, JoinConfig
from headway.cluster.joined import JoinedEngine
from headway.config import EngineConfig
from headway.engine.child import OVERLOADED
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.messages import KEY_BYTES, VERSION, Alive, BlockNews, Dismiss, Joining
from headway.engine.supervision import Supervision
from headway.engine.wire import FrameReader, encode
from headway.errors import ConfigError
from headway.kv.prefix import chain_keys, chain_seed
from headway.serve.tls import tls_context
from headway.values.params import SamplingParams
from headway.values.plan import Emission
from joined_fleet import KEY, begin, front, joined, params, port_of, require_whole, until

RAW = KEY.encode()
TLS = Path(echo_join.__file__).parent / "tls"
INFO = EngineInfo("echo", 2_000_000, 320, 16, 4096, 64, (0,))


@pytest.fixture(autouse=True)
async def connections(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """None of a test's own is left open."""
    writers, connect = [], asyncio.open_connection

    async def remember(*args: Any, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect(*args, **more)
        writers.append(writer)
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", remember)
    yield
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0.01)


async def dial(client: FleetClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port_of(client))


async def enter(client: FleetClient, name: str = "fake") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A peer that has the key and says to be an engine."""
    reader, writer = await dial(client)
    await greet_front(reader, writer, RAW)
    writer.write(encode(Joining(name, name, 1, INFO)))
    return reader, writer


async def is_closed(reader: asyncio.StreamReader, within_s: float = 3.0) -> bytes:
    """What is said until the connection ends."""
    async with asyncio.timeout(within_s):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@asynccontextmanager
async def busy() -> AsyncIterator[FleetClient]:
    """A front with an engine that answers meanwhile, whatever comes; every answer is whole at the end."""
    async with joined(1, key=KEY) as (client, _):
        begun = await begin(client, 4, 500)
        yield client
        await require_whole(begun, 500)
        assert [each.engine.name for each in client.replicas if each.engine.is_up] == ["e0"]
        assert client.num_restarts == 0


async def test_a_wrong_key_is_refused_and_said() -> None:
    async with busy() as client:
        for key in (b"another key of sixteen bytes", None):
            reader, writer = await dial(client)
            with pytest.raises(JoinRefused, match="key"):
                await greet_front(reader, writer, key)
            writer.close()
        with killed([start_echo(port_of(client), "x", key="another key of sixteen bytes")]) as engines:
            assert await asyncio.to_thread(engines[0].process.wait, 30) == REFUSED


async def test_a_recorded_handshake_proves_nothing_in_another_connection() -> None:
    async with busy() as client:
        reader, writer = await dial(client)
        theirs = Hello.decode(await reader.readexactly(HELLO_BYTES))
        nonce = os.urandom(32)
        recorded = Hello(VERSION, True, nonce).encode() + proof(RAW, b"engine", theirs.nonce, nonce)
        writer.write(recorded)
        assert await reader.readexactly(1) == b"\0", "it is good in its own connection"
        writer.close()
        reader, writer = await dial(client)
        await reader.readexactly(HELLO_BYTES)
        writer.write(recorded)
        assert await reader.readexactly(1) == b"\1"
        writer.close()


async def test_an_engine_leaves_a_front_that_cannot_prove_to_have_the_key() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Hello(VERSION, True, bytes(32)).encode())
        answer = await reader.readexactly(ANSWER_BYTES)
        writer.write(b"\0" + answer[-32:])  # the engine's own proof, sent back
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    with pytest.raises(JoinRefused, match="prove"):
        await greet_front(reader, writer, RAW)
    writer.close()
    server.close()


async def test_another_version_is_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy() as client:
        reader, writer = await dial(client)
        await reader.readexactly(HELLO_BYTES)
        writer.write(Hello(VERSION + 1, True, bytes(32)).encode() + bytes(32))
        assert b"same version" in await is_closed(reader)
        writer.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, os.urandom(4096), b"\xff" * 200])
async def test_garbage_before_the_handshake_is_dropped(garbage: bytes) -> None:
    async with busy() as client:
        reader, writer = await dial(client)
        writer.write(garbage)
        await is_closed(reader)
        writer.close()


async def test_peers_that_say_nothing_are_few_and_have_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "HANDSHAKE_S", 0.5)
    async with busy() as client:
        slow = [await dial(client) for _ in range(40)]
        for number, (_, writer) in enumerate(slow):
            writer.write(b"headway"[: number % 8])
        assert client.gate is not None
        while client.gate._unknown.total() < handshake.MOST_UNKNOWN_PER_IP:
            await asyncio.sleep(0.01)
        for reader, writer in slow:
            await is_closed(reader, 5.0)
            writer.close()
        assert not client.gate._unknown
        with killed([start_echo(port_of(client), "late", key=KEY)]) as more:
            await until(client, 2)
            more[0].end()
            await until(client, 1)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<IB", 2**31, VERSION),
        struct.pack("<IB", 100, VERSION) + os.urandom(99),
        struct.pack("<IB", 1, VERSION + 1),
        encode(Submit(1, [1], SamplingParams())),
        encode(Emission([1, 2], [3], [])),
    ],
    ids=["oversized", "garbage", "version", "a front's frame", "columns that differ"],
)
async def test_an_engine_that_sends_what_makes_no_sense_loses_its_connection_alone(frame: bytes) -> None:
    async with busy() as client:
        reader, writer = await enter(client)
        await until(client, 2)
        writer.write(frame)
        await is_closed(reader)
        await until(client, 1)
        writer.close()


@pytest.mark.parametrize(
    "message",
    [Emission([500] * 3, [5, 6], []), Emission([500], [5], [Output(500)]), Output(500)],
    ids=["columns that differ", "a step's end that is none", "an end that is none"],
)
async def test_nothing_of_what_makes_no_sense_is_believed(message: Emission[Output] | Output) -> None:
    prompt = [65, 66, 67]
    async with front(key=KEY) as client:
        reader, writer = await enter(client)
        await until(client, 1)
        stream = client.submit(Submit(500, prompt, params(50)))
        writer.write(encode(message))
        await is_closed(reader)
        with killed([start_echo(port_of(client), "sound", key=KEY)]):
            tokens, last = await rest(stream)
        assert (last.finish, tokens) == ("length", expected(prompt, 50))
        writer.close()


async def test_a_small_engine_limits_the_others_no_longer_than_it_is_here() -> None:
    async with front(key=KEY) as client:
        for number, info in enumerate((INFO, replace(INFO, num_blocks=3, max_num_seqs=1))):
            reader, writer = await dial(client)
            await greet_front(reader, writer, RAW)
            writer.write(encode(Joining(f"e{number}", f"e{number}", 1, info)))
            await until(client, number + 1)
        assert client.info.num_blocks == 3
        await client.drain("e1")
        assert (client.info.num_blocks, client.info.max_num_seqs) == (INFO.num_blocks, INFO.max_num_seqs)


async def test_a_refusal_says_what_differs() -> None:
    async with front(key=KEY) as client:
        for number, identity in enumerate(("1234567890abcdef:int8:fp16:16", "1234567890abcdef:int8:fp16:32")):
            reader, writer = await dial(client)
            await greet_front(reader, writer, RAW)
            writer.write(encode(Joining(f"e{number}", f"e{number}", 1, replace(INFO, identity=identity))))
            if not number:
                await until(client, 1)
        refusal = await is_closed(reader, 10.0)
        assert b"int8:fp16:32), not" in refusal
        assert b"int8:fp16:16)" in refusal
        writer.close()


async def test_no_engine_speaks_for_another_ones_requests() -> None:
    async with busy() as client:
        _, writer = await enter(client)
        await until(client, 2)
        ids = list(client._home)
        writer.write(encode(Emission(ids, [9] * len(ids), [Output(ids[0], finish="stop")])))
        writer.write(encode(Output(ids[1], finish="error", error="no")))
        await asyncio.sleep(0.2)
        writer.close()
        await until(client, 1)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Answer every request with the start of its prompt, until sent away; the reason."""
    frames = FrameReader(is_engine=True)
    while True:
        writer.write(encode(Alive(1, False, 1.0)))
        for command in frames.feed(await reader.read(65536)):
            if isinstance(command, Dismiss):
                return command.reason
            if isinstance(command, Submit):
                done = Output(command.id, finish="length")
                writer.write(encode(Emission([command.id] * 5, command.tokens[:5], [done])))


async def test_an_engine_that_announces_blocks_it_lacks_is_sent_away() -> None:
    prompt = list(range(1, 65))
    keys = [key[:KEY_BYTES] for key in chain_keys(prompt, 16, chain_seed("", "", "", b""))]
    async with busy() as client:
        reader, writer = await enter(client)
        await until(client, 2)
        writer.write(encode(BlockNews(keys, is_whole=True)))
        answering = asyncio.create_task(answer(reader, writer))
        while len(client._index) < len(keys):
            await asyncio.sleep(0.005)
        for id in range(100, 103):
            stream = client.submit(Submit(id, prompt, params(5)))
            assert client._home[id].engine.name == "fake", "it was believed"
            assert (await rest(stream))[0] == prompt[:5]
        assert "announced blocks" in await answering
        assert not len(client._index)


async def test_an_engine_of_another_model_is_refused_and_ends() -> None:
    async with front() as client:
        with killed([start_echo(port_of(client), "a"), start_echo(port_of(client), "b", max_len=100)]) as engines:
            codes = [asyncio.to_thread(each.process.wait) for each in engines]
            done, _ = await asyncio.wait(
                [asyncio.ensure_future(each) for each in codes], timeout=30, return_when="FIRST_COMPLETED"
            )
            assert [task.result() for task in done] == [REFUSED], "whichever came second"
            await until(client, 1)


async def test_tls_is_checked_by_the_engine() -> None:
    tls = tls_context(str(TLS / "cert.pem"), str(TLS / "key.pem"))
    config = EngineConfig.of(model="slow", max_model_len=2_000_000)
    client = FleetClient.start(
        config, num_replicas=0, gate=GateConfig.of("127.0.0.1:0", KEY, None, tls), rules=Supervision()
    )
    await client.connect()
    try:
        name = f"localhost:{port_of(client)}"
        with killed([start_echo(0, "good", join=name, key=KEY, tls_ca=str(TLS / "cert.pem"))]):
            await until(client, 1)
            await require_whole(await begin(client, 2, 20), 20)
        untrusting = ssl.create_default_context()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("localhost", port_of(client), ssl=untrusting)
    finally:
        await client.close(0.1)


def test_without_a_key_only_this_machine_can_be_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("0.0.0.0", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigError, match="no key"):
            GateConfig.of(f"{host}:7500", None, None, None)
    GateConfig.of("0.0.0.0:7500", KEY, None, None)
    assert "without TLS" in caplog.text
    with pytest.raises(ConfigError, match="HOST:PORT"):
        GateConfig.of("7500", None, None, None)
    with pytest.raises(ConfigError, match="16 or more"):
        GateConfig.of("127.0.0.1:7500", "short", None, None)


async def test_an_address_that_cannot_be_listened_at_is_an_error_of_the_configuration() -> None:
    for address in ("a..b:0", "192.0.2.1:0"):
        client = FleetClient.start(EngineConfig.of(), num_replicas=0, gate=GateConfig.of(address, KEY, None, None))
        with pytest.raises(ConfigError, match="--listen-engines"):
            await client.connect()
        await client.close()


@pytest.mark.parametrize(
    "join", ["", "host", "a..b:7500", ".:7500", f"{'a' * 64}:7500", "host:0", "host:7500,a..b:7500"]
)
def test_a_front_that_cannot_be_dialled_is_an_error_of_the_configuration(join: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        JoinConfig(join=join)


async def test_both_sides_agree_only_with_the_same_key() -> None:
    results: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await admit_engine(reader, writer, RAW)
            results.append(True)
        except handshake.HandshakeFailed as failure:
            results.append(str(failure))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    for key in (RAW, RAW + b"x"):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        if key == RAW:
            await greet_front(reader, writer, key)
        else:
            with pytest.raises(JoinRefused):
                await greet_front(reader, writer, key)
        writer.close()
    server.close()
    assert results[0] is True
    assert "key" in str(results[1])


async def refuse_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[int]) -> None:
    """An engine that is always full, and does not say so before it is asked."""
    frames = FrameReader(is_engine=True)
    while data := await reader.read(65536):
        for command in frames.feed(data):
            if isinstance(command, Submit):
                seen.append(command.id)
                writer.write(encode(Output(command.id, finish="error", error="full", code=OVERLOADED)))
        writer.write(encode(Alive(1, False, 1.0)))


async def test_a_storm_of_refusals_is_not_made_larger_by_retries() -> None:
    seen: list[int] = []
    async with front(key=KEY) as client:
        engines = [await enter(client, name) for name in ("a", "b", "c")]
        refusing = [asyncio.create_task(refuse_all(*each, seen)) for each in engines]
        await until(client, 3)
        for id in range(1, 301):
            _, last = await rest(client.submit(Submit(id, [1, 2, 3], params(5))))
            assert last.code == OVERLOADED
        assert 300 < len(seen) <= 1.2 * 300
        for task in refusing:
            task.cancel()
        await asyncio.gather(*refusing, return_exceptions=True)


async def test_a_refused_request_that_no_other_engine_can_be_sent_ends_with_the_refusal() -> None:
    seen: list[int] = []
    async with front(key=KEY) as client:
        refusing = [asyncio.create_task(refuse_all(*await enter(client, name), seen)) for name in ("a", "b")]
        await until(client, 2)
        for id in range(1, 41):
            stream = client.submit(Submit(id, [1, 2, 3], params(5)))
            (other,) = (each.engine for each in client.replicas if each is not client._home[id])
            assert isinstance(other, JoinedEngine)
            other._max_pending_bytes, most = -1, other._max_pending_bytes  # its connection takes nothing now
            _, last = await asyncio.wait_for(rest(stream), 20)
            other._max_pending_bytes = most
            assert last.code == OVERLOADED
        assert sum(each.engine.takes_requests for each in client.replicas) == 2
        for task in refusing:
            task.cancel()
        await asyncio.gather(*refusing, return_exceptions=True)
