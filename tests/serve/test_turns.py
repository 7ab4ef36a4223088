"""Turns on threads: clients alternate, short work passes long work, what waits is bounded and can leave."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from headway.errors import Overloaded
from headway.serve.turns import LONG_BYTES, FairTurns


class Gate:
    """Work that is held until it is let go; notes the order in which work began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._held: dict[str, threading.Event] = {}

    def work(self, name: str, *, is_held: bool = False):  # type: ignore[no-untyped-def]
        if is_held:
            self._held[name] = threading.Event()

        def run() -> str:
            self.begun.append(name)
            if name in self._held:
                assert self._held[name].wait(20)
            return name

        return run

    def let_go(self, name: str) -> None:
        self._held[name].set()


async def begun(gate: Gate, name: str) -> None:
    async with asyncio.timeout(20):
        while name not in gate.begun:
            await asyncio.sleep(0.001)


async def test_clients_alternate_and_one_thread_is_left_to_short_work() -> None:
    gate, turns = Gate(), FairTurns()
    long = LONG_BYTES + 1
    first = asyncio.create_task(turns.run("hog", long, gate.work("hog0", is_held=True)))
    await begun(gate, "hog0")
    hogs = [asyncio.create_task(turns.run("hog", long, gate.work(f"hog{at}"))) for at in (1, 2, 3)]
    other = asyncio.create_task(turns.run("other", long, gate.work("other")))
    await asyncio.sleep(0)
    assert await turns.run("third", 10, gate.work("short")) == "short"
    assert gate.begun == ["hog0", "short"]
    gate.let_go("hog0")
    await asyncio.gather(first, other, *hogs)
    assert gate.begun[2:] == ["hog1", "other", "hog2", "hog3"]
    turns.close()


async def test_short_work_without_end_does_not_keep_long_work_from_its_turn() -> None:
    gate, turns = Gate(), FairTurns()
    for name in ("a", "b"):
        asyncio.create_task(turns.run("x", 1, gate.work(name, is_held=True)))  # noqa: RUF006
        await begun(gate, name)
    short = asyncio.create_task(turns.run("y", 1, gate.work("short")))
    long = asyncio.create_task(turns.run("z", LONG_BYTES + 1, gate.work("long")))
    await asyncio.sleep(0)
    gate.let_go("a")
    await long
    assert gate.begun[2] == "long"
    gate.let_go("b")
    await short
    turns.close()


async def test_what_waits_is_bounded_and_work_that_is_not_wanted_any_more_is_not_done() -> None:
    gate, turns = Gate(), FairTurns(max_waiting=2, max_waiting_bytes=100)
    held = [asyncio.create_task(turns.run("a", 1, gate.work(f"held{at}", is_held=True))) for at in (0, 1)]
    await begun(gate, "held1")
    waiting = asyncio.create_task(turns.run("a", 90, gate.work("left")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await turns.run("b", 11, gate.work("too large"))
    second = asyncio.create_task(turns.run("b", 10, gate.work("second")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await turns.run("c", 0, gate.work("too many"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    third = asyncio.create_task(turns.run("c", 90, gate.work("third")))
    await asyncio.sleep(0)
    gate.let_go("held0")
    gate.let_go("held1")
    await asyncio.gather(*held, second, third)
    assert sorted(gate.begun) == ["held0", "held1", "second", "third"]
    turns.close()


async def test_a_failure_is_the_callers() -> None:
    turns = FairTurns()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await turns.run("a", 1, fail)
    assert await turns.run("a", 1, lambda: 5) == 5
    turns.close()


async def test_work_that_is_not_wanted_any_more_is_not_kept() -> None:
    class Work:
        def __call__(self) -> None:
            raise AssertionError("it was done")

    gate, turns = Gate(), FairTurns()
    held = [asyncio.create_task(turns.run("a", 1, gate.work(f"held{at}", is_held=True))) for at in (0, 1)]
    await begun(gate, "held1")
    work = Work()
    kept = weakref.ref(work)
    waiting = asyncio.create_task(turns.run("a", 1, work))
    del work
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    del waiting
    gc.collect()
    assert kept() is None
    gate.let_go("held0")
    gate.let_go("held1")
    await asyncio.gather(*held)
    turns.close()
