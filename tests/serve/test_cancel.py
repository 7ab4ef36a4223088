"""A task that is cancelled in the very moment in which what it waits for comes must still end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headway.config import ServerConfig
from headway.engine.client import Stats
from headway.serve import insight
from headway.serve.service import Service


class _Client:
    """Says its numbers when told to."""

    dead = None

    def __init__(self) -> None:
        self.reply: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()

    async def stats(self) -> Stats:
        return await self.reply


async def _numbers(client: _Client) -> None:
    service = Service(ServerConfig(port=0))
    service._client = client  # type: ignore[assignment]
    service._model = client  # type: ignore[assignment]
    await service.stats()


async def _asked(client: _Client) -> None:
    await insight.patiently(Service(ServerConfig(port=0)), client.stats)


@pytest.mark.parametrize("wait", [_numbers, _asked])
def test_a_cancelled_wait_ends_although_its_answer_came(wait: Callable[[_Client], Awaitable[None]]) -> None:
    async def race() -> bool:
        client = _Client()

        async def forever() -> None:
            while True:
                await wait(client)
                client.reply = asyncio.get_running_loop().create_future()

        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.reply.set_result(Stats())
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.5)
        task.cancel()
        return task in done

    assert asyncio.run(race())
