"""A keeper of one engine: the engine is brought back when it ends or stands still, and never outlives its keeper."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import echo_keeper
from echo_keeper import keep
from headway.cluster.keeper import EngineKeeper
from headway.errors import EngineDead
from joined_fleet import front, port_of, until


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def wait(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s
        await asyncio.sleep(0.01)


@contextmanager
def ended(keeper: EngineKeeper) -> Iterator[EngineKeeper]:
    try:
        yield keeper
    finally:
        keeper.end()
        assert keeper.pid is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_engine_that_ends_is_brought_back(number: int) -> None:
    async with front() as client:
        with ended(keep(port_of(client))) as keeper:
            await until(client, 1)
            first = keeper.pid
            assert first is not None
            os.kill(first, number)
            await wait(lambda: keeper.pid not in (None, first))
            await wait(lambda: [each.engine.pid for each in client.replicas if each.engine.is_up] == [keeper.pid])
            keeper.require_health()
            assert keeper.num_restarts == 1


async def test_an_idle_engine_that_stands_still_is_replaced() -> None:
    async with front() as client:
        with ended(keep(port_of(client), stall_s=0.5)) as keeper:
            await until(client, 1)
            first = keeper.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            await wait(lambda: keeper.pid not in (None, first))
            await until(client, 1)
            assert not is_there(first)


async def test_the_end_of_a_keeper_is_told_to_the_front(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with front() as client:
        keeper = keep(port_of(client))
        await until(client, 1)
        engine = keeper.pid
        await asyncio.to_thread(keeper.end)
        await until(client, 0)
        assert engine is not None
        assert not is_there(engine)
        assert "it ends as planned" in caplog.text


async def test_an_engine_that_no_front_wants_is_not_started_again() -> None:
    async with front(1) as client:
        await until(client, 1)
        with ended(keep(port_of(client), max_len=100)) as keeper:
            await wait(lambda: keeper._failure is not None)
            with pytest.raises(EngineDead, match="cannot be of use here"):
                keeper.require_health()
            assert keeper.num_restarts == 0


@pytest.mark.parametrize(("model", "attempts"), [("die-in-build", 2), ("bad-config", 0)])
def test_an_engine_that_never_comes_up_is_given_up(model: str, attempts: int) -> None:
    with ended(keep(1, model)) as keeper:
        with pytest.raises(EngineDead, match="its log says why"):
            keeper.wait_ready(60)
        assert keeper.num_restarts == attempts


async def test_an_engine_that_is_not_wanted_any_more_ends() -> None:
    wanted = [True]
    async with front() as client:
        with ended(keep(port_of(client), is_wanted=lambda: wanted[0])) as keeper:
            await until(client, 1)
            engine = keeper.pid
            wanted[0] = False
            assert engine is not None
            await wait(lambda: not is_there(engine))
            await wait(lambda: keeper._failure is not None)
            with pytest.raises(EngineDead):
                keeper.require_health()


@pytest.mark.parametrize("how", ["thread", "socket"])
async def test_an_engine_ends_with_a_keeper_that_is_killed(how: str) -> None:
    """`thread`: by the system's signal, although it is stopped and reads no socket. `socket`: by the socket alone."""
    async with front() as client:
        command = [sys.executable, str(Path(echo_keeper.__file__)), str(port_of(client)), how]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
            try:
                assert keeper.stdout is not None
                engine = int(await asyncio.to_thread(keeper.stdout.readline))
                await until(client, 1)
                if how == "thread":
                    os.kill(engine, signal.SIGSTOP)
            finally:
                keeper.kill()
        await wait(lambda: not is_there(engine))
        await until(client, 0)


def test_a_process_whose_parent_was_killed_sees_that_also_if_it_is_not_reaped() -> None:
    """This process starts a parent, which starts a child; the parent is killed and stays a zombie for a while."""
    lines = (
        "from headway.cluster.keeper import EngineKeeper; import time",
        "is_there = EngineKeeper.parent_is_there(); print(is_there(), flush=True)",
        "while is_there(): time.sleep(0.01)",
        "print('gone', flush=True)",
    )
    child = "\n".join(lines)
    parent = f"import subprocess,sys;subprocess.run([sys.executable,'-c',{child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        os.kill(process.pid, signal.SIGKILL)
        readable, _, _ = select.select([process.stdout], [], [], 60.0)
        assert readable
        assert process.stdout.readline() == "gone\n"  # before `wait` reaps it
