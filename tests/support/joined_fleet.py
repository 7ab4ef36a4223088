"""A front and engines around `EchoEngine` that joined it, and streams that run through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import echo_child
from echo_join import killed, start_echo
from echo_streams import expected, grow, rest
from headway.cluster.client import FleetClient
from headway.cluster.gate import GateConfig
from headway.cluster.spawn import JoiningProcess
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.streams import OutputStream
from headway.engine.supervision import Supervision
from headway.values.params import SamplingParams

CHILD = (str(Path(echo_child.__file__)),)
QUICK = Supervision(backoff_s=0.01)
KEY = "a key of more than sixteen bytes"


def params(max_tokens: int = 300) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@asynccontextmanager
async def front(
    own: int = 0, *, port: int = 0, model: str = "slow", key: str | None = None
) -> AsyncIterator[FleetClient]:
    config = EngineConfig.of(model=model, max_model_len=2_000_000, num_blocks=200_000)
    gate = GateConfig.of(f"127.0.0.1:{port}", key, None, None)
    client = FleetClient.start(config, num_replicas=own, command=CHILD, rules=QUICK, gate=gate)
    await client.connect()
    try:
        yield client
    finally:
        await client.close(1.0)
        assert not client._home
        assert not any(each.engine.entries for each in client.replicas)


async def until(client: FleetClient, count: int, limit_s: float = 30.0) -> None:
    """Wait for so many replicas that take requests."""
    began = time.monotonic()
    while sum(each.engine.takes_requests for each in client.replicas) != count:
        assert time.monotonic() - began < limit_s, client.table()
        await asyncio.sleep(0.005)


def port_of(client: FleetClient) -> int:
    assert client.gate is not None
    return client.gate.port


async def begin(client: FleetClient, count: int, length: int) -> dict[int, tuple[list[int], OutputStream]]:
    streams = {id: client.submit(Submit(id, [64 + id, 66, 67], params(length))) for id in range(1, count + 1)}
    return {id: (await grow(stream, 2 + id % 5), stream) for id, stream in streams.items()}


async def require_whole(begun: dict[int, tuple[list[int], OutputStream]], length: int) -> None:
    for id, (first, stream) in begun.items():
        tokens, last = await rest(stream)
        assert (last.finish, last.error) == ("length", None)
        assert first + tokens == expected([64 + id, 66, 67], length)


@asynccontextmanager
async def joined(count: int, **options: object) -> AsyncIterator[tuple[FleetClient, list[JoiningProcess]]]:
    """A front with so many engines that joined."""
    async with front(**options) as client:  # type: ignore[arg-type]
        with killed([start_echo(port_of(client), f"e{at}", key=options.get("key")) for at in range(count)]) as engines:
            await until(client, count + int(options.get("own", 0)))  # type: ignore[call-overload]
            yield client, engines


def engine_of(client: FleetClient, process: JoiningProcess):  # type: ignore[no-untyped-def]
    return next(each.engine for each in client.replicas if each.engine.pid == process.pid)
