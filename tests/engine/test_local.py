"""The engine on a thread: the same guarantees as the engine process."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from echo_engine import EchoEngine
from headway.engine.client import Output, Submit
from headway.engine.local import LocalClient
from headway.engine.streams import OutputStream
from headway.errors import ConfigError, EngineDead
from headway.values.params import SamplingParams
from headway.values.plan import Emission, TokenLogprob

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


async def test_requests_run_together_and_end_once() -> None:
    client = await LocalClient.start(EchoEngine)

    async def tokens(id: int) -> list[int]:
        outputs = [output async for output in client.submit(Submit(id, [id, id + 1], GREEDY))]
        assert [output.finish for output in outputs if output.finish] == ["length"]
        return [token for output in outputs for token in output.tokens]

    assert await asyncio.gather(*(tokens(id) for id in range(1, 30))) == [[i, i + 1] * 3 for i in range(1, 30)]
    assert client.num_open == 0
    await client.close()


async def test_refused_request_gets_its_reason_on_the_stream() -> None:
    client = await LocalClient.start(lambda: EchoEngine(max_waiting=0))
    output = await anext(client.submit(Submit(1, [1], GREEDY)))
    assert (output.finish, output.code) == ("error", "server_is_overloaded")
    await client.close()
    client = await LocalClient.start(lambda: EchoEngine(max_model_len=5))
    output = await anext(client.submit(Submit(1, [1], GREEDY)))
    assert (output.finish, output.code, output.param) == ("error", "context_length_exceeded", "max_tokens")
    await client.close()


async def test_settings_are_reported_and_changed_and_bad_ones_are_refused() -> None:
    client = await LocalClient.start(EchoEngine)
    assert (await client.reconfigure({}))["beta"] == 20.0
    stream = client.submit(Submit(1, [1, 2], GREEDY))
    assert await client.reconfigure({"beta": 3.5, "target_itl_ms": 40}) == await client.reconfigure({})
    with pytest.raises(ConfigError, match="'gamma' is no setting; allowed: max_num_seqs"):
        await client.reconfigure({"gamma": 1})
    assert [token async for output in stream for token in output.tokens] == [1, 2] * 3
    assert await client.reconfigure({}) == {"max_num_seqs": 64, "target_itl_ms": 40, "beta": 3.5}
    await client.close()
    with pytest.raises(EngineDead):
        await client.reconfigure({})


async def test_close_ends_open_streams_and_the_engine() -> None:
    engine = EchoEngine(max_model_len=10**9, num_blocks=10**8)
    client = await LocalClient.start(lambda: engine)
    stream = client.submit(Submit(1, [1], SamplingParams(max_tokens=10**8)))
    await anext(stream)
    await client.close()
    outputs = [output async for output in stream]
    assert outputs[-1].finish == "error"
    assert engine.is_closed
    with pytest.raises(EngineDead):
        client.submit(Submit(2, [1], GREEDY))
    await client.close()


async def test_engine_that_cannot_be_built_is_reported() -> None:
    def refuse() -> EchoEngine:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await LocalClient.start(refuse)


async def test_failing_step_ends_every_stream() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    client = await LocalClient.start(lambda: EchoEngine(on_step=fail))
    streams = [client.submit(Submit(id, [1], GREEDY)) for id in range(3)]
    for stream in streams:
        assert [output.finish async for output in stream] == ["error"]
    assert client.dead
    await client.close()


async def test_stream_that_is_closed_while_awaited_ends() -> None:
    client = await LocalClient.start(EchoEngine)
    stream = client.submit(Submit(1, [1], GREEDY))
    outputs = [output async for output in stream]
    assert outputs[-1].finish == "length"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    await client.close()


def test_import_brings_no_third_party_package() -> None:
    code = (
        "import sys, headway.engine.local\n"
        "bad = {'msgspec', 'torch', 'numpy', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_step_is_delivered_whole_with_each_tokens_log_probability() -> None:
    client = await LocalClient.start(lambda: EchoEngine(hold_after=0))
    streams = {id: client.submit(Submit(id, [1], GREEDY)) for id in (1, 2)}
    logprobs = {1: [TokenLogprob(-0.5), TokenLogprob(-0.25)], 9: [TokenLogprob(-1.0)]}  # no stream is open for 9
    client._dispatch([Emission([1, 2, 1, 9], [5, 6, 7, 8], [Output(1, finish="stop"), Output(9)], logprobs)])
    first = await anext(streams[1])
    assert (first.tokens, first.logprobs, first.finish) == ([5, 7], logprobs[1], "stop")
    assert (await anext(streams[2])) == Output(2, [6], [])
    assert client.num_open == 1
    await client.close()


async def test_a_reader_that_waits_is_not_cut_off_by_frames_that_come_together() -> None:
    client = await LocalClient.start(lambda: EchoEngine(hold_after=0), max_buffer_bytes=1000)
    streams = [client.submit(Submit(id, [1], GREEDY)) for id in (1, 2)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    for id in (1, 2):
        client._dispatch([Emission([id], [5], []) for _ in range(50)])
    assert [(each.finish, list(each.tokens)) for each in await asyncio.gather(*readers)] == [(None, [5] * 50)] * 2
    await client.close()


async def test_log_probabilities_that_nobody_reads_count_as_what_waits() -> None:
    client = await LocalClient.start(lambda: EchoEngine(hold_after=0), max_buffer_bytes=1000)
    stream = client.submit(Submit(1, [1], GREEDY))
    client._dispatch([Emission([1], [5], [], {1: [TokenLogprob(-0.5, ((5, -0.5), (6, -1.0), (7, -2.0)))]})])
    for _ in range(3):  # turns of the event loop in which a reader could have read
        await asyncio.sleep(0)
    output = await anext(stream)
    assert (output.finish, output.code, output.tokens) == ("error", "slow_consumer", [])
    await client.close()


def test_the_last_token_is_not_taken_without_the_end_that_came_with_it() -> None:
    """What takes a token alone takes no note of an end."""
    stream = OutputStream(1, lambda id: None)
    told: list[int] = []
    stream.listen(lambda: told.append(1))
    stream.push_token(7)
    assert stream.take_known({7: "a"}) == "a"
    stream.push_token(7)
    stream.end(Output(1, finish="length"))
    assert stream.take_known({7: "a"}) is None
    assert len(told) == 2
    last = stream.take()
    assert last is not None
    assert (last.tokens, last.finish) == ([7], "length")
