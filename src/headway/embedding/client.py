"""The server's side of the process that makes vectors: requests in fair turns, and a new process when one ends.

A frame takes texts of several requests in turn, so that a request of two thousand texts does not hold up one of one.
A text that ends two processes, the second time with no other beside it, fails its request alone.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from headway.embedding.frames import HEAD_BYTES, MAX_FRAME_BYTES, Opened, Setup, Texts, Vectors, decode, frame
from headway.errors import ConfigError, EngineRestarting, Overloaded, RowFailed

log = logging.getLogger(__name__)
T = TypeVar("T")

WORKER = ("-P", "-m", "headway.embedding.worker")
FRAME_TOKENS = 4096
MOST_WAIT_S = 30.0  # a request that would wait longer for its turn is refused
_START_S = 300.0
_ANSWER_S, _TOKEN_S = 60.0, 0.05  # how long a frame may take: so long, and so much more for each token
_FIRST_SPEED = 1000.0  # tokens a second, until it is known


class _TextJob:
    """A request's texts, and the vectors there are; `done` has a result once every text has one."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.vectors: list[bytes] = [b""] * len(texts)
        self.next = 0  # the first text that was not taken yet
        self.num_left = len(texts)
        self.tokens_each = sum(map(len, texts)) / len(texts)
        self.done: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    def put(self, index: int, vector: bytes) -> None:
        self.vectors[index] = vector
        self.num_left -= 1
        if not self.num_left and not self.done.done():
            self.done.set_result(self.vectors)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


_Place = tuple[_TextJob, int]  # a text: its request and its index there


class EmbeddingClient:
    """One process at a time, one frame at a time. `opened` is what the model is, once `start` has returned."""

    def __init__(self, setup: Setup, command: Sequence[str] = WORKER) -> None:
        self._setup = setup
        self._command = command
        self._process: Process | None = None
        self._serving: asyncio.Task[None] | None = None
        self._jobs: deque[_TextJob] = deque()
        self._suspects: deque[_Place] = deque()  # their process ended: each is tried alone
        self._is_second = False  # the frame under way is such a text
        self._wake = asyncio.Event()
        self._speed = _FIRST_SPEED
        self._open: set[_TextJob] = set()
        self.opened = Opened()
        self.num_texts = self.num_tokens = self.num_restarts = 0

    async def start(self) -> None:
        """Load the model; ConfigError if that cannot be."""
        await self._bring_up()
        self._serving = asyncio.create_task(self._serve())

    async def embed(self, texts: Sequence[list[int]]) -> list[bytes]:
        """A vector of float32 numbers for each text. Overloaded if the queue is too long, RowFailed if it cannot be."""
        # Requests take turns, so that of a larger one only as many texts come before its last as it has itself.
        ahead = sum(min(len(texts), job.num_left) * job.tokens_each for job in self._open)
        wait_s = ahead / self._speed
        if wait_s > MOST_WAIT_S:
            raise Overloaded(
                f"{len(self._open)} requests wait for vectors; this one would wait for {wait_s:.0f} s, more than "
                f"{MOST_WAIT_S:g}; try again later",
                retry_after_s=wait_s - MOST_WAIT_S,
            )
        job = _TextJob(texts)
        self._open.add(job)
        self._jobs.append(job)
        self._wake.set()
        try:
            vectors = await job.done
        finally:
            self._open.discard(job)
            job.done.cancel()  # of a client that has gone: its texts are not taken any more
        self.num_texts += len(texts)
        self.num_tokens += sum(map(len, texts))
        return vectors

    def end_all(self) -> None:
        """Requests that wait fail now."""
        for job in list(self._open):
            job.fail(EngineRestarting("the server is shutting down"))

    async def close(self) -> None:
        """End the process; requests that wait fail."""
        self.end_all()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._end()

    async def _serve(self) -> None:
        while True:
            places = self._take()
            if not places:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                if self._process is None:
                    await self._bring_up()
                await self._compute(places)
            except ConfigError as error:
                self._fail_all(places, EngineRestarting(f"{error}; try again later"))
            except Exception as error:  # what a pipe without a reader raises differs from one event loop to the other
                log.error("the process that makes vectors ended (%r); another one is started", error)
                self.num_restarts += 1
                await self._end()
                if self._is_second:
                    self._give_up(places, "the process that makes vectors ended with it twice; it is not tried again")
                else:
                    self._suspects.extend(places)

    async def _compute(self, places: list[_Place]) -> None:
        texts = [job.texts[index] for job, index in places]
        num_tokens, size, begun = sum(map(len, texts)), 4 * self.opened.size, time.monotonic()
        async with asyncio.timeout(_ANSWER_S + _TOKEN_S * num_tokens):
            await self._send(Texts(texts))
            answer = await self._receive(Vectors)
        if answer.error:
            if len(places) > 1:
                self._suspects.extend(places)
            else:
                self._give_up(places, answer.error)
            return
        if len(answer.data) != size * len(texts):
            raise EOFError(f"{len(answer.data)} bytes for {len(texts)} texts")
        self._speed += 0.2 * (num_tokens / max(1e-6, time.monotonic() - begun) - self._speed)
        for at, (job, index) in enumerate(places):
            job.put(index, answer.data[at * size : (at + 1) * size])

    def _give_up(self, places: list[_Place], why: str) -> None:
        for job, _ in places:
            job.fail(RowFailed(f"a text could not be made a vector: {why}"))

    def _fail_all(self, places: list[_Place], error: Exception) -> None:
        for job in (*self._jobs, *(job for job, _ in (*self._suspects, *places))):
            job.fail(error)
        self._jobs.clear()
        self._suspects.clear()

    def _take(self) -> list[_Place]:
        """The texts of the next frame: one of each request in turn, or a single one that may have ended a process."""
        self._is_second = True
        while self._suspects:
            job, index = self._suspects.popleft()
            if not job.done.done():
                return [(job, index)]
        self._is_second = False
        places: list[_Place] = []
        num_tokens = 0
        while self._jobs:
            job = self._jobs[0]
            if job.done.done():
                self._jobs.popleft()
                continue
            num_tokens += len(job.texts[job.next])
            if places and num_tokens > FRAME_TOKENS:
                break
            places.append((job, job.next))
            job.next += 1
            self._jobs.popleft()
            if job.next < len(job.texts):
                self._jobs.append(job)
        return places

    async def _bring_up(self) -> None:
        """Start a process and wait until its model is there."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the server alone, which then ends this one
        )
        try:
            async with asyncio.timeout(_START_S):
                await self._send(self._setup)
                self.opened = await self._receive(Opened)
        except Exception as error:
            await self._end()
            raise ConfigError(f"the process that makes vectors did not come up ({error!r})") from None
        except BaseException:
            await self._end()
            raise
        if self.opened.error:
            await self._end()
            raise ConfigError(self.opened.error)

    async def _send(self, message: Setup | Texts) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))
        await self._process.stdin.drain()

    async def _receive(self, kind: type[T]) -> T:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(HEAD_BYTES)
        length = int.from_bytes(head, "little")
        if length > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {length} bytes")
        return decode(await self._process.stdout.readexactly(length), kind)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
