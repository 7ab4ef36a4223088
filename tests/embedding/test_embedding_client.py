"""The process that makes vectors: requests in turns, and what happens when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from headway.embedding import client as client_file
from headway.embedding.client import EmbeddingClient
from headway.embedding.frames import Setup
from headway.errors import ConfigError, EngineRestarting, Overloaded, RowFailed
from tiny_encoders import write_tiny_encoder

POISON = 17
TEXTS = [[2, 4, 5, 3], [2, 6, 7, 8, 9, 3], [2, 3]]
# The real worker, but a text with the poison ends it.
POISONED = (
    "import os, sys; import headway.embedding.model as m; embed = m.EmbeddingModel.embed\n"
    f"is_bad = lambda texts: any({POISON} in text for text in texts)\n"
    "m.EmbeddingModel.embed = lambda self, texts: os._exit(9) if is_bad(texts) else embed(self, texts)\n"
    "from headway.embedding.worker import main; sys.exit(main())"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "m"
    write_tiny_encoder(path)
    return path


@asynccontextmanager
async def started(folder: Path, *command: str) -> AsyncIterator[EmbeddingClient]:
    setup = Setup(str(folder), str(folder / "cache"), "auto", 1, "error", "text")
    client = EmbeddingClient(setup, command) if command else EmbeddingClient(setup)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def pid(client: EmbeddingClient) -> int:
    assert client._process is not None
    return client._process.pid


async def test_requests_share_frames_and_get_their_own(folder: Path) -> None:
    async with started(folder) as client:
        assert (client.opened.size, client.opened.max_tokens, client.opened.vocab_size) == (48, 64, 32)
        alone = [(await client.embed([text]))[0] for text in TEXTS]
        many = await asyncio.gather(*(client.embed([TEXTS[at % 3], TEXTS[0]]) for at in range(40)))
        assert all(vectors == [alone[at % 3], alone[0]] for at, vectors in enumerate(many))
        assert abs(sum(x * x for x in struct.unpack("<48f", alone[0])) - 1) < 1e-5
        assert (client.num_texts, client.num_restarts) == (83, 0)


async def test_a_small_request_does_not_wait_for_a_large_one(folder: Path) -> None:
    async with started(folder) as client:
        large = asyncio.create_task(client.embed([[2, *[5] * 60, 3]] * 2000))
        await asyncio.sleep(0)
        await client.embed([TEXTS[0]])
        assert not large.done()
        assert len(await large) == 2000


async def test_a_killed_process_is_replaced_and_nothing_is_lost(folder: Path) -> None:
    async with started(folder) as client:
        wanted = await client.embed(TEXTS)
        first = pid(client)
        os.kill(first, signal.SIGSTOP)
        asked = [asyncio.create_task(client.embed(TEXTS)) for _ in range(3)]
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        assert all(vectors == wanted for vectors in await asyncio.gather(*asked))
        assert pid(client) != first
        assert client.num_restarts == 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_that_ends_is_replaced_whether_it_was_idle_or_had_a_single_text(
    folder: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """As the server does it: loops differ in what they say of a pipe without a reader."""

    async def ending() -> None:
        async with started(folder) as client:
            wanted = await client.embed(TEXTS[:1])
            os.kill(pid(client), signal.SIGKILL)
            await asyncio.sleep(0.3)  # it was idle, and its end is known
            assert await asyncio.wait_for(client.embed(TEXTS[:1]), 30) == wanted
            os.kill(pid(client), signal.SIGKILL)  # and here it is not
            assert await asyncio.wait_for(client.embed(TEXTS[:1]), 30) == wanted
            os.kill(pid(client), signal.SIGSTOP)
            asked = asyncio.create_task(client.embed(TEXTS[:1]))
            await asyncio.sleep(0.1)
            os.kill(pid(client), signal.SIGKILL)
            assert await asyncio.wait_for(asked, 30) == wanted
            assert client.num_restarts == 3

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ending())


async def test_a_signal_to_end_is_for_the_server_alone(folder: Path) -> None:
    """Supervisors send it to every process of a service; what has begun is still to be finished."""
    async with started(folder) as client:
        wanted = await client.embed(TEXTS)
        for told in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid(client), told)
            await asyncio.sleep(0.1)
        assert await client.embed(TEXTS) == wanted
        assert client.num_restarts == 0


async def test_a_text_that_ends_processes_fails_its_request_alone(folder: Path) -> None:
    async with started(folder, "-c", POISONED) as client:
        wanted = await client.embed(TEXTS)
        good = [asyncio.create_task(client.embed(TEXTS)) for _ in range(5)]
        bad = asyncio.create_task(client.embed([TEXTS[0], [2, POISON, 3]]))
        assert all(vectors == wanted for vectors in await asyncio.gather(*good))
        with pytest.raises(RowFailed, match="ended with it"):
            await bad
        assert client.num_restarts == 2
        assert await client.embed(TEXTS) == wanted


async def test_a_wrong_token_fails_its_request_alone(folder: Path) -> None:
    async with started(folder) as client:
        good, bad = asyncio.create_task(client.embed(TEXTS)), asyncio.create_task(client.embed([[2, 99, 3]]))
        assert len(await good) == 3
        with pytest.raises(RowFailed, match="a token is outside"):
            await bad
        assert client.num_restarts == 0


async def test_a_client_that_leaves_takes_its_texts_along(folder: Path) -> None:
    async with started(folder) as client:
        leaving = asyncio.create_task(client.embed([[2, *[5] * 60, 3]] * 1000))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert not client._open
        assert len(await client.embed(TEXTS)) == 3
        assert not client._jobs


async def test_a_queue_that_is_too_long_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_file, "MOST_WAIT_S", 0.01)
    async with started(folder) as client:
        os.kill(pid(client), signal.SIGSTOP)
        waiting = asyncio.create_task(client.embed([[2, *[5] * 60, 3]] * 10))
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="1 requests wait"):
            await client.embed([[2, *[5] * 60, 3]])
        os.kill(pid(client), signal.SIGCONT)
        assert len(await waiting) == 10


async def test_a_process_that_does_not_come_up_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not come up"):
        async with started(folder, "-c", "raise SystemExit(3)"):
            pass
    with pytest.raises(ConfigError, match="embedding_model is"):
        async with started(tmp_path / "nothing"):
            pass


async def test_closing_ends_what_waits(folder: Path) -> None:
    async with started(folder) as client:
        os.kill(pid(client), signal.SIGSTOP)
        waiting = [asyncio.create_task(client.embed(TEXTS)) for _ in range(2)]
        await asyncio.sleep(0.01)
        await client.close()
        for each in waiting:
            with pytest.raises(EngineRestarting):
                await each
