"""Many streams over HTTP from one thread, at the least cost: the client shares the cores with what it measures.

A request is one connection and one prepared block of bytes; the bytes of the answer are kept with their arrival times,
and `latency` reads them afterwards. No HTTP library. Knows the OpenAI API and nothing of the engine behind it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from headway.bench.latency import Answered, Piece, read_answer
from headway.bench.workload import WorkItem
from headway.errors import ConfigError, EngineError

ANSWER_S = 600.0  # longer than any answer of a bench: a server that hangs does not hang the client
_TAIL = 2048  # bytes: more than the last two events together


@dataclass(slots=True)
class Stream:
    """When a request was sent, and what arrived when, on one clock; several tokens may share a piece."""

    sent: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    broken: str | None = None  # why the connection ended, if not by the server's closing it

    @property
    def arrivals(self) -> list[float]:
        return [at for at, data in self.pieces if b"data: " in data]

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.sent

    def read(self) -> Answered:
        """What the bytes say; not while anything is measured."""
        return read_answer(self.sent, self.pieces, self.broken)

    def check(self) -> None:
        """Raise unless the answer ended as the work said: with its last token, at its length."""
        tail = b"".join(data for _, data in self.pieces[-4:])[-_TAIL:]
        if b"data: [DONE]" not in tail or b'"finish_reason":"length"' not in tail.replace(b": ", b":"):
            said = tail.decode("utf-8", "replace")[-500:]
            raise EngineError(f"an answer ended early ({self.broken or 'closed'}): {said!r}")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `prefix` is the path before /v1."""

    host: str
    port: int
    model: str
    api_key: str | None = None
    prefix: str = ""
    is_secure: bool = False

    @staticmethod
    def of(url: str, model: str, api_key: str | None = None) -> Target:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r}; allowed: http://host:port or https://host, with or without /v1")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"url is {url!r}; its port must be 0 to 65535") from error
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Target(parts.hostname, port, model, api_key, prefix, parts.scheme == "https")

    def request(self, work: WorkItem, salt: str) -> bytes:
        """For headway: greedy, streamed, exactly as long as the work says."""
        body = {"prompt": work.tokens, "max_tokens": work.max_tokens, "temperature": 0}
        return self.post("/v1/completions", body | {"stream": True, "ignore_eos": True, "cache_salt": salt})

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """A whole HTTP request."""
        data = json.dumps({"model": self.model, **body}).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        if self.api_key:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return f"{head}\r\n".encode() + data


def offered(url: str, api_key: str | None = None) -> list[str]:
    """The names of the models that a server has, at least one."""
    target = Target.of(url, "")
    kind = HTTPSConnection if target.is_secure else HTTPConnection
    connection = kind(target.host, target.port, timeout=30)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", f"{target.prefix}/v1/models", headers=headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise ValueError(f"GET /v1/models answered {response.status}")
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except OSError as error:
        raise EngineError(f"cannot reach {url}: {error}") from error
    except (HTTPException, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url} offers no model ({error}); is it an OpenAI-compatible server?") from error
    finally:
        connection.close()
    if not names:
        raise EngineError(f"{url} offers no model; is it an OpenAI-compatible server?")
    return names


def run_streams(target: Target, works: Sequence[WorkItem], streams: int, salt: str) -> list[Stream]:
    """Send every request, at most `streams` at a time, in order; raises if one is not answered in full."""
    found = run_requests(target, [target.request(work, salt) for work in works], streams)
    for stream in found:
        stream.check()
    return found


def run_requests(target: Target, prepared: Sequence[bytes], streams: int) -> list[Stream]:
    """The same for any requests; what an answer says is not looked at."""
    try:
        return asyncio.run(_run(target, prepared, streams))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # one reason is enough: the others are mostly the same


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
            await loop.create_connection(
                lambda: _Connection(request, stream, ended),  # noqa: B023
                target.host,
                target.port,
                ssl=target.is_secure or None,
            )
        except OSError as error:
            raise EngineError(f"cannot reach {target.host}:{target.port}: {error}") from error
        try:
            async with asyncio.timeout(ANSWER_S):
                await ended
        except TimeoutError:
            raise EngineError(f"{target.host}:{target.port} did not end an answer within {ANSWER_S:g} s") from None


class _Connection(asyncio.Protocol):
    """One request on one connection; `ended` is done when the server has closed it."""

    def __init__(self, request: bytes, stream: Stream, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._stream = stream
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stream.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._stream.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.broken = None if exc is None else str(exc)
        if not self._ended.done():
            self._ended.set_result(None)
