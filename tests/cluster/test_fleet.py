"""Several engines behind one client: requests spread, and go on in another engine when theirs ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import echo_child
from echo_streams import expected, grow, rest
from headway.cluster.client import FleetClient
from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica
from headway.config import EngineConfig
from headway.engine import supervisor
from headway.engine.client import Submit
from headway.engine.streams import HOLD_S, OutputStream
from headway.engine.supervision import Supervision
from headway.errors import ConfigError, EngineRestarting
from headway.values.params import SamplingParams

CHILD = (str(Path(echo_child.__file__)),)
QUICK = Supervision(backoff_s=0.01)


def params(max_tokens: int = 300, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def fleet(model: str | Path = "slow", count: int = 3, rules: Supervision = QUICK) -> AsyncIterator[FleetClient]:
    config = EngineConfig.of(model=str(model), max_model_len=2_000_000, num_blocks=200_000)
    client = FleetClient.start(config, num_replicas=count, command=CHILD, rules=rules)
    await client.connect()
    try:
        await client.ready()
        yield client
    finally:
        await client.close(1.0)
        assert not client._home
        assert not any(each.engine.entries or each.engine._tasks for each in client.replicas)


async def begin(client: FleetClient, count: int, length: int = 300) -> dict[int, tuple[list[int], OutputStream]]:
    """Streams that have begun, with their first tokens."""
    streams = {id: client.submit(Submit(id, [64 + id, 66, 67], params(length))) for id in range(1, count + 1)}
    return {id: (await grow(stream, 2 + id % 5), stream) for id, stream in streams.items()}


async def require_whole(begun: dict[int, tuple[list[int], OutputStream]], length: int = 300) -> None:
    for id, (first, stream) in begun.items():
        tokens, last = await rest(stream)
        assert first + tokens == expected([64 + id, 66, 67], length)
        assert last.finish == "length"


async def test_requests_spread_over_all_replicas() -> None:
    async with fleet() as client:
        begun = await begin(client, 12)
        assert [len(each.engine.entries) for each in client.replicas] == [4, 4, 4]
        await require_whole(begun)
        assert (await client.stats()).finished == {"length": 12}


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_of_an_engine_that_ends_go_on_elsewhere_at_once(sig: signal.Signals) -> None:
    async with fleet(rules=Supervision(backoff_s=0.01, stall_s=0.4)) as client:
        begun = await begin(client, 12, 400)
        gone = client.replicas[1]
        os.kill(gone.engine.pid or 0, sig)
        while gone.engine.entries:
            await asyncio.sleep(0.005)
        assert client.recovering is None, "the others take requests"
        assert not gone.engine.is_up, "nothing waited for the next process"
        await require_whole(begun, 400)
        assert client.num_restarts == 1


async def test_what_goes_on_elsewhere_is_paid_for_out_of_the_budget_of_retries() -> None:
    async with fleet() as client:
        begun = await begin(client, 12)
        assert len(client.replicas[1].engine.entries) == 4
        os.kill(client.replicas[1].engine.pid or 0, signal.SIGKILL)
        while client.replicas[1].engine.entries:
            await asyncio.sleep(0.005)
        assert not client.budget.spend(), "twelve came, which pays for two; four had to go on"
        await require_whole(begun)


async def test_one_after_the_other_is_killed_and_no_token_is_lost_or_doubled() -> None:
    async with fleet() as client:
        begun = await begin(client, 12, 900)
        for number in (0, 1, 2, 0, 1):
            engine = client.replicas[number].engine
            while not engine.takes_requests:
                await asyncio.sleep(0.005)
            os.kill(engine.pid or 0, signal.SIGKILL)
            while engine.is_up:
                await asyncio.sleep(0.001)
        await require_whole(begun, 900)


async def test_all_are_killed_at_once_and_requests_wait_for_the_first_that_is_back() -> None:
    async with fleet() as client:
        begun = await begin(client, 6)
        for replica in client.replicas:
            os.kill(replica.engine.pid or 0, signal.SIGKILL)
        while client.recovering is None:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineRestarting):
            await client.stats()
        await require_whole(begun)


async def test_requests_are_held_for_a_fleet_that_has_just_ended_and_for_no_single_engine() -> None:
    for count, least_s in ((2, HOLD_S - 2), (1, 0.0)):
        async with fleet(count=count) as client:
            assert client.hold_s == 0, "none has ended"
            for replica in client.replicas:
                os.kill(replica.engine.pid or 0, signal.SIGKILL)
            while client.recovering is None:
                await asyncio.sleep(0.001)
            assert least_s <= client.hold_s <= HOLD_S * (count > 1)
            client._lost_at -= HOLD_S  # as if that were long ago
            assert client.hold_s == 0


async def test_a_request_that_crashes_engines_crashes_those_of_its_own_replica_alone() -> None:
    async with fleet("poison") as client:
        begun = await begin(client, 9, 600)
        bad = client.submit(Submit(50, [65, echo_child.POISON], params(5)))
        home = client._home[50]
        _, last = await rest(bad)
        assert (last.finish, last.error) == ("error", "this request ended the engine process")
        await require_whole(begun, 600)
        assert [each.engine.num_restarts > 0 for each in client.replicas] == [each is home for each in client.replicas]


async def test_a_replica_whose_processes_are_killed_again_and_again_is_not_given_up_while_another_serves() -> None:
    async with fleet(count=2, rules=Supervision(backoff_s=0.01, max_deaths=2)) as client:
        begun = await begin(client, 6, 900)
        engine = client.replicas[0].engine
        for _ in range(4):
            while engine.pid is None:
                await asyncio.sleep(0.001)
            engine._num_deaths = 2  # as if none had made a step
            pid = engine.pid
            os.kill(pid, signal.SIGKILL)
            while engine.pid == pid:
                await asyncio.sleep(0.001)
        await require_whole(begun, 900)
        while not engine.takes_requests:
            await asyncio.sleep(0.005)
        assert engine.failure is None


async def test_answers_to_one_prompt_go_to_one_replica() -> None:
    async with fleet() as client:
        first = client.submit(Submit(1, [70, 71], params(20)))
        others = [client.submit(Submit(id, [70, 71], params(20), parent=1)) for id in (2, 3, 4)]
        assert {client._home[id] for id in (1, 2, 3, 4)} == {client._home[1]}
        for stream in (first, *others):
            assert (await rest(stream))[0] == expected([70, 71], 20)


async def test_an_aborted_request_ends_wherever_it_is() -> None:
    async with fleet() as client:
        begun = await begin(client, 6, 100_000)
        for id in begun:
            client.abort(id)
        for _, stream in begun.values():
            assert (await rest(stream))[1].finish == "abort"
        left = await begin(client, 3, 100_000)
        for _, stream in left.values():
            await stream.aclose()
        while (await client.stats()).running:
            await asyncio.sleep(0.005)


async def test_settings_reach_every_engine_and_its_successor() -> None:
    async with fleet() as client:
        assert (await client.reconfigure({"beta": 3.0}))["beta"] == 3.0
        with pytest.raises(ConfigError, match="no setting"):
            await client.reconfigure({"gamma": 3.0})
        os.kill(client.replicas[2].engine.pid or 0, signal.SIGKILL)
        began = time.monotonic()
        while not (client.replicas[2].engine.num_restarts and client.replicas[2].engine.is_up):
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.005)
        assert (await client.reconfigure({}))["beta"] == 3.0
        assert client.replicas[2].engine.settings == {"beta": 3.0}


async def test_a_configuration_that_is_at_fault_ends_the_fleet() -> None:
    client = FleetClient.start(EngineConfig.of(model="bad-config"), num_replicas=2, command=CHILD)
    await client.connect()
    with pytest.raises(ConfigError, match="not good enough"):
        await client.ready()
    await client.close(1.0)


async def test_a_rolling_restart_replaces_every_process_and_no_answer_notices() -> None:
    async with fleet() as client:
        pids = [each.engine.pid for each in client.replicas]
        begun = await begin(client, 9, 1500)
        await client.restart()
        assert all(each.engine.pid not in (None, *pids) for each in client.replicas)
        assert [row["restarts"] for row in client.table()] == [1, 1, 1]
        assert not any(each.engine._suspects._suspects for each in client.replicas), "no request is to blame"
        await require_whole(begun, 1500)


@pytest.mark.parametrize("first", ["restart", "drain"])
async def test_a_rolling_restart_ends_though_a_replica_is_drained_meanwhile(first: str) -> None:
    async with fleet() as client:
        pids = [each.engine.pid for each in client.replicas]
        begun = await begin(client, 6, 1500)
        if first == "restart":
            restart = asyncio.create_task(client.restart())
            await asyncio.sleep(0.02)
            await client.drain("2", grace_s=0.1)
        else:
            drain = asyncio.create_task(client.drain("2", grace_s=1.0))
            await asyncio.sleep(0.05)
            restart = asyncio.create_task(client.restart())
            await drain
        await asyncio.wait_for(restart, 15)
        assert [each.engine.name for each in client.replicas] == ["0", "1"]
        assert all(each.engine.pid not in (None, *pids) for each in client.replicas)
        await client.restart()
        await require_whole(begun, 1500)


async def test_one_replica_is_restarted_under_requests_that_wait_for_it() -> None:
    async with fleet(count=1, rules=Supervision(backoff_s=0.01, max_deaths=1)) as client:
        begun = await begin(client, 3, 600)
        for _ in range(3):
            await client.restart()
        assert client.dead is None, "what was asked for is no death"
        await require_whole(begun, 600)


async def test_a_replica_that_never_starts_is_given_up_and_the_others_serve(tmp_path: Path) -> None:
    async with fleet(tmp_path / "die-in-second-life", count=2, rules=Supervision(backoff_s=0.01)) as client:
        stream = client.submit(Submit(1, [70, 71], params(20)))
        assert (await rest(stream))[0] == expected([70, 71], 20)
        assert sum(each.engine.failure is not None for each in client.replicas) == 1
        assert sum(row["failure"] is not None for row in client.table()) == 1


async def test_requests_do_not_wait_for_their_own_replica_when_another_is_back(tmp_path: Path) -> None:
    async with fleet(count=2, rules=Supervision(backoff_s=60.0, max_deaths=9)) as client:
        begun = await begin(client, 4, 500)
        one, two = (each.engine for each in client.replicas)
        two._num_deaths = 1  # the next start is delayed for longer than this test takes
        two._start_another = hold  # type: ignore[method-assign, assignment]
        for engine in (one, two):
            os.kill(engine.pid or 0, signal.SIGKILL)
        await require_whole(begun, 500)
        assert not two.is_up


async def hold(words: str) -> None:
    await asyncio.Event().wait()


async def test_a_supervisor_that_fails_ends_its_process_and_no_token_comes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(count=2, rules=Supervision(backoff_s=0.01, stall_s=0.2)) as client:
        begun = await begin(client, 4, 600)
        broken = client.replicas[0].engine
        pid, look_at = broken.pid, supervisor.look_at

        def look(number: int) -> object:
            if number == pid:
                raise OSError("the system does not say")
            return look_at(number)

        monkeypatch.setattr(supervisor, "look_at", look)
        await require_whole(begun, 600)
        assert (broken.failure is not None, broken.is_up, broken.pid) == (True, False, None)
        assert client.dead is None


class RaisingRoute:
    def __init__(self) -> None:
        self.is_broken = False

    def choose(self, submit: Submit, replicas: Sequence[Replica], index: HolderIndex) -> tuple[Replica, int]:
        if self.is_broken:
            raise ValueError("no idea")
        return replicas[0], 1


async def test_a_route_that_raises_loses_no_request() -> None:
    config = EngineConfig.of(model="slow", max_model_len=2_000_000, num_blocks=200_000)
    route = RaisingRoute()
    client = FleetClient.start(config, num_replicas=3, command=CHILD, rules=QUICK, route=route)
    await client.connect()
    await client.ready()
    begun = await begin(client, 4)
    route.is_broken = True
    os.kill(client.replicas[0].engine.pid or 0, signal.SIGKILL)
    await require_whole(begun)
    await client.close(1.0)


async def test_settings_reach_a_process_that_starts_while_they_change() -> None:
    async with fleet(count=2) as client:
        starting = client.replicas[1].engine
        os.kill(starting.pid or 0, signal.SIGKILL)
        while starting.is_up:
            await asyncio.sleep(0.001)
        await client.reconfigure({"beta": 4.0})
        assert starting.settings == {"beta": 4.0}, "its next process begins with them"


async def test_which_replica_has_a_request_is_known_while_it_runs_and_for_a_while_after() -> None:
    async with fleet(count=2) as client:
        long = client.submit(Submit(1, [70, 71], params(100_000)))
        for id in range(2, 40):
            assert (await rest(client.submit(Submit(id, [72], params(2)))))[1].finish == "length"
        assert 1 in client._home
        assert len(client._was_at) == 38
        await long.aclose()
        assert 1 in client._was_at
