"""The engine process: its life, its death, and what the client's streams see of both."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import echo_child
from headway.cluster.client import FleetClient
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.supervision import Supervision
from headway.errors import ConfigError, EngineDead, Overloaded
from headway.values.params import SamplingParams
from headway.values.plan import Emission

CHILD = (str(Path(echo_child.__file__)),)
ONE_LIFE = Supervision(max_deaths=1)
LONG = SamplingParams(max_tokens=500, temperature=0.0)


@asynccontextmanager
async def running(model: str = "echo", **options: int) -> AsyncIterator[FleetClient]:
    """An engine process that is not replaced; tests/engine/test_supervisor.py is about those that are."""
    config = EngineConfig.of(model=model, max_model_len=2_000_000, num_blocks=200_000)
    client = FleetClient.start(config, command=CHILD, rules=ONE_LIFE, **options)
    process = client.replicas[0].engine._engine
    assert process is not None
    await client.connect()
    try:
        yield client
    finally:
        await client.close()
        assert process.exit_code is not None


def pid_of(client: FleetClient) -> int:
    assert client.pid is not None
    return client.pid


async def test_request_runs_in_the_child_and_ends_once() -> None:
    async with running() as client:
        info = await client.ready()
        assert info.max_model_len == 2_000_000
        stream = client.submit(Submit(1, [65, 66, 67], SamplingParams(max_tokens=7, temperature=0.0)))
        outputs = [output async for output in stream]
        assert [token for output in outputs for token in output.tokens] == [65, 66, 67, 65, 66, 67, 65]
        assert [output.finish for output in outputs if output.finish] == ["length"]
        assert outputs[-1].timing is not None
        assert client.num_open == 0
        stats = await client.stats()
        assert stats.tokens_generated == 7
        assert stats.blocks_free == stats.blocks_total


async def test_settings_of_the_child_change_and_a_bad_one_changes_nothing() -> None:
    async with running() as client:
        await client.ready()
        assert (await client.reconfigure({"beta": 2.5, "max_num_seqs": 3}))["max_num_seqs"] == 3
        with pytest.raises(ConfigError, match="'gamma' is no setting"):
            await client.reconfigure({"gamma": 1})
        assert await client.reconfigure({}) == {"max_num_seqs": 3, "target_itl_ms": None, "beta": 2.5}


async def test_logprobs_cross_the_wire() -> None:
    async with running() as client:
        await client.ready()
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
        entries = [entry async for output in client.submit(Submit(1, [65], params)) for entry in output.logprobs]
        assert [(entry.logprob, entry.top) for entry in entries] == [(-0.5, ((65, -0.5), (66, -1.5)))] * 3


async def test_abort_ends_the_stream_with_its_reason() -> None:
    async with running() as client:
        await client.ready()
        stream = client.submit(Submit(1, [65], SamplingParams(max_tokens=1_000_000, temperature=0.0)))
        await anext(stream)
        client.abort(1, "stop")
        finishes = [output.finish async for output in stream if output.finish]
        assert finishes == ["stop"]
        client.abort(1)
        client.abort(99)


async def test_closing_the_stream_aborts_the_request() -> None:
    async with running() as client:
        await client.ready()
        stream = client.submit(Submit(1, [65], SamplingParams(max_tokens=1_000_000, temperature=0.0)))
        await anext(stream)
        await stream.aclose()
        assert client.num_open == 0
        stats = await client.stats()
        assert stats.running == 0
        assert stats.finished == {"abort": 1}


async def test_unread_stream_is_cut_at_its_bound_and_the_engine_goes_on() -> None:
    async with running(max_buffer_bytes=16 * 1024) as client:
        await client.ready()
        slow = client.submit(Submit(1, [65], SamplingParams(max_tokens=1_000_000, temperature=0.0)))
        while 1 in client._streams:
            quick = [o async for o in client.submit(Submit(2, [65], SamplingParams(max_tokens=5, temperature=0.0)))]
            assert quick[-1].finish == "length"
        output = await anext(slow)
        assert (output.finish, output.code) == ("error", "slow_consumer")
        assert output.tokens == []
        assert (await client.stats()).running == 0


@pytest.mark.parametrize("how", ["die-in-step", "raise-in-step"])
async def test_death_of_the_engine_ends_every_stream_with_one_error(how: str) -> None:
    async with running(how) as client:
        await client.ready()
        streams = [client.submit(Submit(i, [65], LONG)) for i in range(8)]
        for stream in streams:
            outputs = [output async for output in stream]
            assert [o.finish for o in outputs if o.finish] == ["error"]
            assert outputs[-1].error
        assert client.dead
        with pytest.raises(EngineDead):
            client.submit(Submit(99, [65], LONG))
        with pytest.raises(EngineDead):
            await client.stats()


async def test_killed_child_is_noticed_and_pending_questions_fail() -> None:
    async with running("hang-in-step") as client:
        await client.ready()
        stream = client.submit(Submit(1, [65], LONG))
        question = asyncio.ensure_future(client.stats())
        await asyncio.sleep(0)
        os.kill(pid_of(client), signal.SIGKILL)
        output = await anext(stream)
        assert output.finish == "error"
        assert "engine process has ended" in (output.error or "")
        with pytest.raises(EngineDead):
            await question


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("bad-config", ConfigError, "not good enough"),
        ("crash-in-build", EngineDead, "out of luck"),
        ("die-in-build", EngineDead, "has ended"),
    ],
)
async def test_failed_start_is_reported(model: str, kind: type[Exception], words: str) -> None:
    async with running(model) as client:
        with pytest.raises(kind, match=words):
            await client.ready()


async def test_only_submits_are_refused_while_too_much_waits_to_reach_the_engine() -> None:
    async with running("hang-in-step", max_buffer_bytes=256) as client:
        await client.ready()
        streams = {id: client.submit(Submit(id, [65], LONG)) for id in (1, 2, 3)}
        streams[4] = client.submit(Submit(4, [65] * 1_000_000, LONG))  # more than the socket holds
        assert client.replicas[0].engine._engine is not None
        client.replicas[0].engine._engine.max_pending_bytes = client.replicas[0].engine._engine.num_pending - 1
        with pytest.raises(Overloaded, match="too many requests wait"):
            client.submit(Submit(5, [65], LONG))
        client.abort(1)
        await streams[2].aclose()
        client._dispatch([Emission([3] * 9, [65] * 9)])  # unread: the client cuts it and aborts the request
        for _ in range(3):  # turns of the event loop in which a reader could have read
            await asyncio.sleep(0)
        assert (await anext(streams[3])).code == "slow_consumer"
        assert set(client._streams) == {1, 4}
        assert client.dead is None
        await client.close(grace_s=0.2)
        assert (await anext(streams[1])).finish == "error"


async def test_close_ends_a_child_that_hangs_in_a_step() -> None:
    async with running("hang-in-step") as client:
        await client.ready()
        stream = client.submit(Submit(1, [65], LONG))
        await client.close(grace_s=0.2)
        assert (await anext(stream)).finish == "error"


async def test_close_while_loading_leaves_no_process() -> None:
    client = FleetClient.start(EngineConfig(), command=CHILD)
    process = client.replicas[0].engine._engine
    assert process is not None
    await client.connect()
    await client.close()
    assert process.exit_code is not None
    with pytest.raises(EngineDead):
        await client.ready()


async def test_child_ignores_signals_to_the_group() -> None:
    async with running() as client:
        await client.ready()
        os.kill(pid_of(client), signal.SIGINT)
        os.kill(pid_of(client), signal.SIGTERM)
        stream = client.submit(Submit(1, [65], SamplingParams(max_tokens=2, temperature=0.0)))
        assert [o.finish async for o in stream if o.finish] == ["length"]


def test_child_exits_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, asyncio\n"
        "from headway.config import EngineConfig\n"
        "from headway.core.request import SamplingParams\n"
        "from headway.engine.client import Submit\n"
        "from headway.cluster.client import FleetClient\n"
        "async def main():\n"
        "    client = FleetClient.start(EngineConfig.of(model='hang-in-step'), command=(sys.argv[1],))\n"
        "    await client.connect()\n"
        "    await client.ready()\n"
        "    client.submit(Submit(1, [65], SamplingParams()))\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script), *CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = os.pidfd_open(pid)
        parent.kill()
    import select

    ended, _, _ = select.select([watch], [], [], 10)
    os.close(watch)
    assert ended
