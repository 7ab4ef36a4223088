"""Engines that die, stand still or are killed, and requests that notice nothing of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import echo_child
from echo_streams import expected, grow, rest
from headway.cluster.client import FleetClient
from headway.config import EngineConfig
from headway.engine.client import Submit
from headway.engine.published import Published
from headway.engine.streams import INTERRUPTED
from headway.engine.supervision import Supervision
from headway.errors import EngineRestarting
from headway.values.params import SamplingParams

CHILD = (str(Path(echo_child.__file__)),)
POISON = 200  # a token: see echo_child
QUICK = Supervision(backoff_s=0.01)


def params(max_tokens: int = 400, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def supervised(model: str | Path = "slow", rules: Supervision = QUICK) -> AsyncIterator[FleetClient]:
    config = EngineConfig.of(model=str(model), max_model_len=2_000_000, num_blocks=200_000)
    client = FleetClient.start(config, command=CHILD, rules=rules)
    await client.connect()
    try:
        await client.ready()
        yield client
    finally:
        await client.close(1.0)
        assert not client.replicas[0].engine._tasks
        assert not client.replicas[0].engine.entries


def kill(client: FleetClient, sig: int = signal.SIGKILL) -> int:
    assert client.pid is not None
    pid = client.pid
    os.kill(pid, sig)
    return pid


async def until_back(client: FleetClient, other_than: int) -> None:
    while client.pid in (None, other_than) or client.recovering is not None:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV])
async def test_answers_go_on_in_another_process_when_theirs_is_killed(sig: int) -> None:
    async with supervised() as client:
        prompts = [[65 + i, 66, 67] for i in range(10)]
        streams = [client.submit(Submit(i, prompt, params(300))) for i, prompt in enumerate(prompts)]
        begun = [await grow(stream, 3 + i) for i, stream in enumerate(streams)]
        pid = kill(client, sig)
        for prompt, first, stream in zip(prompts, begun, streams, strict=True):
            tokens, last = await rest(stream)
            assert first + tokens == expected(prompt, 300)
            assert last.finish == "length"
        assert client.pid != pid
        assert client.num_restarts == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # reaped


async def test_a_request_without_a_token_begins_anew_and_one_that_comes_meanwhile_waits(tmp_path: Path) -> None:
    async with supervised(tmp_path / "hold") as client:
        waiting = client.submit(Submit(1, [65, 66], params(6)))
        pid = kill(client)
        while client.recovering is None:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineRestarting, match="being replaced"):
            await client.stats()
        late = client.submit(Submit(2, [70, 71], params(4)))
        (tmp_path / "hold.open").touch()
        assert (await rest(waiting))[0] == [65, 66] * 3
        assert (await rest(late))[0] == [70, 71] * 2
        assert client.pid != pid


async def test_with_resume_off_begun_answers_end_in_an_error_and_others_are_retried() -> None:
    rules = Supervision(resumes=False, backoff_s=0.01)
    async with supervised(rules=rules) as client:
        begun = client.submit(Submit(1, [65], params(1000)))
        await grow(begun, 2)
        os.kill(client.pid or 0, signal.SIGSTOP)
        waiting = client.submit(Submit(2, [66], params(5)))
        kill(client)
        _tokens, last = await rest(begun)
        assert (last.finish, last.code) == ("error", INTERRUPTED)
        assert (await rest(waiting))[0] == [66] * 5


async def test_the_third_death_in_a_row_without_a_step_is_the_last(tmp_path: Path) -> None:
    async with supervised(tmp_path / "die-in-second-life") as client:
        stream = client.submit(Submit(1, [65], params(1000)))
        await grow(stream, 2)
        kill(client)
        _, last = await rest(stream)
        assert last.finish == "error"
        assert "3 times" in await client.death()
        assert client.num_restarts == 2


async def test_an_idle_engine_may_be_killed_any_number_of_times() -> None:
    async with supervised("echo") as client:
        for number in range(5):
            await until_back(client, kill(client))
            assert (await client.stats()).restarts == number + 1
        assert (await rest(client.submit(Submit(1, [65], params(3)))))[0] == [65] * 3


async def test_waits_of_an_engine_that_is_gone_are_forgotten() -> None:
    async with supervised("echo") as client:
        client.published = Published(num_waiting=9, waits={"": 99.0})
        await until_back(client, kill(client))
        assert client.published is None


async def test_a_stopped_engine_is_replaced_and_leaves_its_stacks(caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(rules=Supervision(stall_s=0.4)) as client:
        stream = client.submit(Submit(1, [65, 66, 67], params(300)))
        begun = await grow(stream, 5)
        pid = kill(client, signal.SIGSTOP)
        tokens, last = await rest(stream)
        assert begun + tokens == expected([65, 66, 67], 300)
        assert last.finish == "length"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "it is stopped by a signal" in caplog.text
    assert "stacks of engine process" in caplog.text
    assert "child.py" in caplog.text


@pytest.mark.parametrize("how", ["sleep", "spin"])
async def test_an_engine_that_hangs_in_a_step_is_replaced(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step hangs once: the file that the first process makes keeps the second from it."""
    async with supervised(tmp_path / f"{how}-once", Supervision(stall_s=0.3)) as client:
        stream = client.submit(Submit(1, [65, 66], params(300)))
        assert (await rest(stream))[0] == expected([65, 66], 300)
        assert client.num_restarts == 1
    assert "its step does not end" in caplog.text
    assert f"in {how}" in caplog.text


async def test_an_engine_that_fails_is_replaced_even_if_its_process_would_linger(tmp_path: Path) -> None:
    unwatched = Supervision(backoff_s=0.01, stall_s=0)
    async with supervised(tmp_path / "linger-once", unwatched) as client, asyncio.timeout(20):
        tokens, last = await rest(client.submit(Submit(1, [65, 66], params(20))))
        assert tokens == expected([65, 66], 20)
        assert last.finish == "length"
        assert client.num_restarts == 1


async def test_a_long_step_that_was_predicted_and_an_idle_engine_are_left_alone() -> None:
    async with supervised("long-step", Supervision(stall_s=0.1)) as client:
        assert (await rest(client.submit(Submit(1, [65], params(2)))))[0] == [65] * 2
        await asyncio.sleep(0.5)  # idle: what is tested is that nothing happens
        assert client.num_restarts == 0


async def test_a_request_that_kills_engines_is_found_and_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with supervised("poison", Supervision(backoff_s=0.01, stall_s=0.0)) as client:
        prompts = {id: [65 + id, 66] for id in range(12)}
        streams = {id: client.submit(Submit(id, prompt, params(100))) for id, prompt in prompts.items()}
        begun = {id: await grow(stream, 2) for id, stream in streams.items()}
        bad = client.submit(Submit(99, [POISON], params(100)))
        tokens, last = await rest(bad)
        assert (tokens, last.finish, last.code) == ([], "error", None)
        for id, stream in streams.items():
            assert begun[id] + (await rest(stream))[0] == expected(prompts[id], 100)
        assert client.recovering is None
        assert 2 <= client.num_restarts <= 7
        assert (await rest(client.submit(Submit(100, [65], params(3)))))[0] == [65] * 3
    assert "request 99 ended an engine process that held no other request" in caplog.text


async def test_requests_that_are_killed_from_outside_again_and_again_are_never_ended() -> None:
    async with supervised() as client:
        stream = client.submit(Submit(1, [65, 66, 67], params(500)))
        tokens: list[int] = []
        for _ in range(6):
            tokens += await grow(stream, 1)
            await until_back(client, kill(client))
        tokens += (await rest(stream))[0]
        assert tokens == expected([65, 66, 67], 500)


async def test_settings_that_were_changed_hold_for_the_next_engine() -> None:
    async with supervised("echo") as client:
        await client.reconfigure({"beta": 2.5})
        await until_back(client, kill(client))
        assert (await client.reconfigure({}))["beta"] == 2.5


async def test_a_request_that_is_aborted_while_there_is_no_engine_ends_at_once() -> None:
    async with supervised() as client:
        one, two = (client.submit(Submit(id, [65], params(1000))) for id in (1, 2))
        await grow(one, 2)
        await grow(two, 2)
        kill(client)
        while client.recovering is None:
            await asyncio.sleep(0.001)
        client.abort(1, "stop")
        assert (await rest(one))[1].finish == "stop"
        await two.aclose()
        assert client.num_open == 0


async def test_end_all_ends_streams_even_if_the_engine_is_stopped() -> None:
    async with supervised(rules=Supervision(stall_s=0.0)) as client:
        streams = [client.submit(Submit(id, [65], params(1000))) for id in range(3)]
        for stream in streams:
            await grow(stream, 2)
        kill(client, signal.SIGSTOP)
        client.end_all()
        assert [(await rest(stream))[1].finish for stream in streams] == ["abort"] * 3


async def test_close_while_another_engine_starts_leaves_no_process() -> None:
    async with supervised() as client:
        stream = client.submit(Submit(1, [65], params(1000)))
        await grow(stream, 2)
        pid = kill(client)
        while client.pid in (None, pid):
            await asyncio.sleep(0.001)
        second = client.pid
        await client.close()
        assert (await rest(stream))[1].finish == "error"
        for ended in (pid, second):
            with pytest.raises(ProcessLookupError):
                os.kill(ended or 0, 0)


async def test_many_kills_leave_neither_descriptors_nor_processes() -> None:
    async with supervised() as client:
        num_open = 0
        for number in range(8):
            stream = client.submit(Submit(number, [65], params(1000)))
            await grow(stream, 1)
            await until_back(client, kill(client))
            await grow(stream, 1)
            await stream.aclose()
            await client.stats()
            if number == 1:
                num_open = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) == num_open
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert children.count(str(client.pid)) == 1


async def test_logprobs_and_times_are_those_of_one_answer() -> None:
    async with supervised() as client:
        stream = client.submit(Submit(1, [65, 66], params(200, logprobs=1)))
        first = await anext(stream)
        await until_back(client, kill(client))
        outputs = [first, *[output async for output in stream]]
        assert sum(len(output.tokens) for output in outputs) == 200
        assert sum(len(output.logprobs) for output in outputs) == 200
        timing = outputs[-1].timing
        assert timing is not None
        parts = timing.queued_s + timing.prefill_s + timing.decode_s + timing.preempted_s
        assert abs(parts - timing.total_s) < 1e-6
        assert 0 < timing.first_token_s < timing.total_s


async def test_an_engine_that_computes_differently_does_not_go_on_with_begun_answers() -> None:
    async with supervised() as client:
        begun = client.submit(Submit(1, [65], params(1000)))
        await grow(begun, 2)
        os.kill(client.pid or 0, signal.SIGSTOP)
        waiting = client.submit(Submit(2, [66], params(5)))
        engine = client.replicas[0].engine
        engine.info = replace(client.info, kernels="those of yesterday")
        kill(client)
        assert (await rest(begun))[1].code == INTERRUPTED
        assert (await rest(waiting))[0] == [66] * 5


async def test_a_kill_for_want_of_memory_is_a_crash_and_another_one_is_not() -> None:
    async with supervised() as client:
        stream = client.submit(Submit(1, [65], params(1000)))
        await grow(stream, 1)
        await until_back(client, kill(client))
        assert 1 not in client.replicas[0].engine._suspects
        await grow(stream, 1)
        client.replicas[0].engine._num_killed -= 1  # the system has ended a process since
        kill(client)
        while client.num_restarts < 2:
            await asyncio.sleep(0.001)
        assert 1 in client.replicas[0].engine._suspects
        await grow(stream, 10)
        assert 1 not in client.replicas[0].engine._suspects, "it made progress"
        await stream.aclose()


async def test_a_request_that_many_killed_engines_gave_no_token_is_suspected() -> None:
    async with supervised() as client:
        stream = client.submit(Submit(1, [65], params(1000)))
        await grow(stream, 1)
        entry = client.replicas[0].engine.entries[1]
        for num_barren, is_crash in ((4, False), (5, True)):
            entry.num_barren = num_barren
            assert client.replicas[0].engine._is_crash(-signal.SIGKILL, None, [1]) is is_crash
        await stream.aclose()


async def test_the_next_engine_has_as_many_blocks_as_the_first() -> None:
    async with supervised() as client:
        assert client.replicas[0].engine._config.cache.num_blocks == client.info.num_blocks


async def test_starts_that_fail_one_after_the_other_are_further_apart(tmp_path: Path) -> None:
    rules = Supervision(backoff_s=0.4)
    async with supervised(tmp_path / "die-in-second-life", rules) as client:
        stream = client.submit(Submit(1, [65], params(1000)))
        await grow(stream, 2)
        while client.recovering is None:
            if client.num_restarts == 0 and client.pid is not None:
                kill(client)
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        await client.death()
        assert time.monotonic() - begun > 0.4, "before the second start"
        await rest(stream)


async def test_a_process_that_cannot_be_started_is_tried_again_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the system has no process left to give."""
    popen, num_faults = subprocess.Popen, 1

    def failing(*args: object, **options: object) -> object:
        nonlocal num_faults
        if num_faults:
            num_faults -= 1
            raise BlockingIOError("resource temporarily unavailable")
        return popen(*args, **options)  # type: ignore[call-overload]

    async with supervised() as client:
        stream = client.submit(Submit(1, [65, 66], params(100)))
        begun = await grow(stream, 2)
        num_open = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr("headway.engine.process.subprocess.Popen", failing)
        await until_back(client, kill(client))
        assert begun + (await rest(stream))[0] == expected([65, 66], 100)
        assert num_faults == 0
        assert len(os.listdir("/proc/self/fd")) == num_open
