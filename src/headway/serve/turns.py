"""Fair turns on a few threads: work whose cost grows with what a client sent, such as tokenizing its prompt.

Clients take turns, one piece of work each. Long pieces share all threads but one, so that a short piece never waits for
a long one to end. What waits is bounded. It knows neither text nor HTTP; all state belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from headway.errors import Overloaded

T = TypeVar("T")

LONG_BYTES = 64 * 1024
_WORKERS = 2
_MAX_WAITING = 1024
_MAX_WAITING_BYTES = 64 * 1024 * 1024


@dataclass(eq=False, slots=True)
class _Turn:
    client: str
    num_bytes: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class _Lane:
    """Jobs of one class by client; the client that comes next is the first key."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_Turn]] = OrderedDict()

    def add(self, job: _Turn) -> None:
        self._queues.setdefault(job.client, deque()).append(job)

    def take(self) -> _Turn | None:
        """The next job whose client still waits; its client goes to the end."""
        while self._queues:
            client, queue = self._queues.popitem(last=False)
            while queue and queue[0].done.done():
                queue.popleft()
            if queue:
                job = queue.popleft()
                if queue:
                    self._queues[client] = queue
                return job
        return None


class FairTurns:
    """At most `workers` jobs run, at most `workers - 1` of them long; a job that waits can be cancelled."""

    def __init__(
        self,
        workers: int = _WORKERS,
        *,
        long_bytes: int = LONG_BYTES,
        max_waiting: int = _MAX_WAITING,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
    ) -> None:
        assert workers >= 2
        self._threads = ThreadPoolExecutor(workers, "turn")
        self._workers = workers
        self._long_bytes = long_bytes
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._lanes = {False: _Lane(), True: _Lane()}
        self._running = {False: 0, True: 0}
        self._num_waiting = 0
        self._waiting_bytes = 0

    async def run(self, client: str, num_bytes: int, work: Callable[[], T]) -> T:
        """The outcome of `work`, called on a thread when it is the client's turn; `Overloaded` if too much waits."""
        is_full = self._num_waiting >= self._max_waiting
        if is_full or (self._num_waiting and self._waiting_bytes + num_bytes > self._max_waiting_bytes):
            raise Overloaded("too many long prompts wait to be read; retry later", retry_after_s=2.0)
        loop = asyncio.get_running_loop()
        job = _Turn(client, num_bytes, work, loop.create_future())
        del work  # a cancellation keeps this frame, and with it what it refers to
        self._lanes[num_bytes > self._long_bytes].add(job)
        self._num_waiting += 1
        self._waiting_bytes += num_bytes
        self._start(loop)
        try:
            outcome: T = await job.done
            return outcome
        finally:
            if job.work is not _begun:  # cancelled while it waited: what is left of it in the queue is empty
                job.work = _begun
                self._leave(job)

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while sum(self._running.values()) < self._workers:
            # One long job may always run, and as many short ones as threads are left.
            order = (True, False) if not self._running[True] else (False, True)
            for is_long in order:
                if is_long and self._running[True] >= self._workers - 1:
                    continue
                job = self._lanes[is_long].take()
                if job is not None:
                    self._begin(job, is_long, loop)
                    break
            else:
                return

    def _begin(self, job: _Turn, is_long: bool, loop: asyncio.AbstractEventLoop) -> None:
        work, job.work = job.work, _begun
        self._leave(job)
        self._running[is_long] += 1
        running = loop.run_in_executor(self._threads, work)

        def ended(outcome: asyncio.Future[Any]) -> None:
            self._running[is_long] -= 1
            _hand_over(outcome, job.done)
            self._start(loop)

        running.add_done_callback(ended)

    def _leave(self, job: _Turn) -> None:
        self._num_waiting -= 1
        self._waiting_bytes -= job.num_bytes


def _begun() -> None:
    """Stands for the work of a job that has begun."""


def _hand_over(outcome: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
    error = None if outcome.cancelled() else outcome.exception()
    if done.done():
        return
    if outcome.cancelled():
        done.cancel()
    elif error is not None:
        done.set_exception(error)
    else:
        done.set_result(outcome.result())
