"""Many streams over HTTP from one thread, at the least cost: the client shares the cores with what it measures.

A request is one connection and one prepared block of bytes; of the answer only arrival times are kept, and the last
bytes, which say whether it ended as it should. No HTTP library: the server's own framing is not looked into. Knows
the completions endpoint of the OpenAI API and nothing of the engine behind it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headway.bench.workload import WorkItem
from headway.errors import ConfigError, EngineError

ANSWER_S = 600.0  # longer than any answer of a bench: a server that hangs does not hang the client
_TAIL = 2048  # bytes: more than the last two events together


@dataclass(slots=True)
class Stream:
    """When a request was sent and when its pieces arrived, on one clock; several tokens may share a piece."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.sent


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    model: str
    api_key: str | None = None

    @staticmethod
    def of(url: str, model: str, api_key: str | None = None) -> Target:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"url is {url!r}; allowed: http://host:port")
        return Target(parts.hostname, parts.port or 80, model, api_key)

    def request(self, work: WorkItem, salt: str) -> bytes:
        """A whole HTTP request: greedy, streamed, exactly as long as the work says."""
        body = {"model": self.model, "prompt": work.tokens, "max_tokens": work.max_tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "cache_salt": salt}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        if self.api_key:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return f"{head}\r\n".encode() + data


def run_streams(target: Target, works: Sequence[WorkItem], streams: int, salt: str) -> list[Stream]:
    """Send every request, at most `streams` at a time, in order; raises if one is not answered in full."""
    prepared = [target.request(work, salt) for work in works]
    return asyncio.run(_run(target, prepared, streams))


async def _run(target: Target, prepared: Sequence[bytes], streams: int) -> list[Stream]:
    results = [Stream() for _ in prepared]
    todo = iter(zip(prepared, results, strict=True))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(prepared))):
            group.create_task(_work(target, todo))
    return results


async def _work(target: Target, todo: Iterator[tuple[bytes, Stream]]) -> None:
    loop = asyncio.get_running_loop()
    for request, stream in todo:
        ended: asyncio.Future[None] = loop.create_future()
        try:
            await loop.create_connection(lambda: _Connection(request, stream, ended), target.host, target.port)  # noqa: B023
        except OSError as error:
            raise EngineError(f"cannot reach {target.host}:{target.port}: {error}") from error
        async with asyncio.timeout(ANSWER_S):
            await ended


class _Connection(asyncio.Protocol):
    """One request on one connection; `ended` is done when the server has closed it."""

    def __init__(self, request: bytes, stream: Stream, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._stream = stream
        self._ended = ended
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stream.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"data: " in data:
            self._stream.arrivals.append(time.perf_counter())
        if not self._head:
            self._head = data
        self._tail = (self._tail + data)[-_TAIL:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended.done():
            return
        if b"data: [DONE]" in self._tail and b'"finish_reason":"length"' in self._tail.replace(b": ", b":"):
            self._ended.set_result(None)
        else:
            said = (self._tail or self._head).decode("utf-8", "replace")[-500:]
            self._ended.set_exception(EngineError(f"an answer ended early ({exc or 'closed'}): {said!r}"))
