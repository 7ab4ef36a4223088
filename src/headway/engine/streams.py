"""The asyncio side of every client: messages of an engine become streams that always end.

`StreamClient` keeps the promise of `EngineClient`: each submitted request gets exactly one terminal output, be
it from the engine, from a consumer that was too slow, or because the engine is gone. How commands reach the
engine is left to `_send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

from headway.engine.client import CacheHit, EngineInfo, Output, Settings, Stats, Submit
from headway.engine.explain import Explanation
from headway.engine.messages import (
    Abort,
    Command,
    Explain,
    Explained,
    Fatal,
    GetStats,
    LookedUp,
    LookUp,
    Message,
    Ready,
    Reconfigure,
    Reconfigured,
    Reply,
    StatsReply,
)
from headway.engine.published import Published
from headway.errors import ConfigError, EngineDead
from headway.values.plan import Emission, TokenLogprob

T = TypeVar("T")

SLOW_CONSUMER = "slow_consumer"
HOLD_S = 5.0  # at most, for a request that comes while there is no engine: a client's patience is longer
INTERRUPTED = "engine_ended"  # the engine ended in the middle of the answer, which is not resumed
# What a waiting token is charged: about the bytes of the event that will carry it.
_TOKEN_BYTES = 128
_LOGPROB_BYTES = 256


class OutputStream:
    """An `OutputSource`; what has piled up is handed over as one. Ends after the terminal output."""

    __slots__ = (
        "_bytes",
        "_final",
        "_is_over",
        "_is_told",
        "_logprobs",
        "_on_close",
        "_tokens",
        "_told",
        "_waiter",
        "id",
    )

    def __init__(self, id: int, on_close: Callable[[int], None]) -> None:
        self.id = id
        self._on_close = on_close
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._bytes = 0
        self._final: Output | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None
        self._told: Callable[[], None] | None = None
        self._is_told = False  # of what waits now

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        if self._is_over:
            raise StopAsyncIteration
        while not self._tokens and self._final is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self._is_over:
                raise StopAsyncIteration
        return self._take()

    def listen(self, told: Callable[[], None] | None) -> None:
        self._told, self._is_told = told, False
        if told is not None and (self._tokens or self._final is not None):
            self._wake()

    def take(self) -> Output | None:
        self._is_told = False
        if self._is_over or (not self._tokens and self._final is None):
            return None
        return self._take()

    def take_known(self, known: Mapping[int, T | None]) -> T | None:
        tokens = self._tokens
        if len(tokens) != 1 or self._logprobs or self._final is not None:
            return None
        found = known[tokens[0]]
        if found is not None:
            tokens.clear()
            self._bytes, self._is_told = 0, False
        return found

    async def aclose(self) -> None:
        """Give up: the request is aborted unless it has ended."""
        if self._final is None and not self._is_over:
            self._on_close(self.id)
        self._is_over = True
        self._wake()

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def push_token(self, token: int) -> int:
        """Add one bare token; returns the bytes that now wait."""
        self._tokens.append(token)
        self._bytes = num_bytes = self._bytes + _TOKEN_BYTES
        if not self._is_told:
            if self._told is None:
                self._wake()
            else:
                self._is_told = True
                self._told()
        return num_bytes

    def push_logprobs(self, entries: Sequence[TokenLogprob]) -> int:
        """Add the log probabilities of tokens that were added; returns the bytes that now wait."""
        self._logprobs.extend(entries)
        self._bytes += sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in entries)
        return self._bytes

    def end(self, final: Output) -> None:
        """After what waits comes the terminal output."""
        self._final = final
        self._wake()

    def cut(self, final: Output) -> None:
        """Drop what waits and end with `final`."""
        self._tokens, self._logprobs = [], []
        self._final = final
        self._wake()

    def _wake(self) -> None:
        if self._told is not None:
            if not self._is_told:
                self._is_told = True
                self._told()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> Output:
        tokens, logprobs, final = self._tokens, self._logprobs, self._final
        self._tokens, self._logprobs, self._bytes = [], [], 0
        if final is None:
            return Output(self.id, tokens, logprobs)
        self._is_over = True
        return replace(final, tokens=tokens, logprobs=logprobs)


class StreamClient:
    """An `EngineClient` over any transport. Once `dead` is set it never comes back."""

    def __init__(self, *, max_buffer_bytes: int = 1024 * 1024) -> None:
        self._max_buffer_bytes = max_buffer_bytes
        self._overfull: dict[int, OutputStream] = {}
        self._streams: dict[int, OutputStream] = {}
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._tickets = count(1)
        self._info: EngineInfo | None = None
        self._failure: EngineDead | ConfigError | None = None
        self.published: Published | None = None  # what the engine said last about waiting times
        self._news = asyncio.Event()  # set when the engine is ready or dead
        self._death = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine is not ready yet; wait for ready()")
        return self._info

    @property
    def dead(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return str(self._failure) if self._failure is not None else None

    @property
    def recovering(self) -> float | None:
        """Seconds until an engine that has ended is probably replaced; None: none is to be."""
        return None

    @property
    def hold_s(self) -> float:
        """How long a request that comes while `recovering` may be held for an engine; 0: it is refused at once."""
        return 0.0

    @property
    def num_open(self) -> int:
        """Streams that have not had their terminal output."""
        return len(self._streams)

    async def ready(self) -> EngineInfo:
        """Wait for the engine; raises ConfigError or EngineDead if it does not come up."""
        await self._news.wait()
        if self._failure is not None:
            raise self._failure
        return self.info

    async def death(self) -> str:
        """Wait until the engine is gone and say why."""
        await self._death.wait()
        return str(self._failure)

    def submit(self, submit: Submit) -> OutputStream:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        assert submit.id not in self._streams, f"request id {submit.id} is in use"
        stream = OutputStream(submit.id, self._give_up)
        self._streams[submit.id] = stream
        try:
            self._send(submit)
        except BaseException:
            del self._streams[submit.id]
            raise
        return stream

    def abort(self, id: int, reason: str = "abort") -> None:
        if id in self._streams and self._failure is None:
            self._send(Abort(id, reason))

    def end_all(self, reason: str = "abort") -> None:
        """End every stream now, whether or not the engine still answers; it is told too, if it can be."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if self._failure is None:
                self._send(Abort(stream.id, reason))
            stream.end(Output(stream.id, finish=reason))

    async def stats(self) -> Stats:
        reply = await self._ask(GetStats)
        assert isinstance(reply, StatsReply)
        return reply.stats

    async def reconfigure(self, changes: Settings) -> Settings:
        reply = await self._ask(lambda ticket: Reconfigure(ticket, changes))
        assert isinstance(reply, Reconfigured)
        if reply.error is not None:
            raise ConfigError(reply.error)
        return reply.settings

    async def explain(self, id: int) -> Explanation | None:
        reply = await self._ask(lambda ticket: Explain(ticket, id))
        assert isinstance(reply, Explained)
        return reply.explanation

    async def look_up(self, submit: Submit) -> CacheHit:
        reply = await self._ask(lambda ticket: LookUp(ticket, submit))
        assert isinstance(reply, LookedUp)
        return reply.hit

    async def _ask(self, question: Callable[[int], Command]) -> Reply:
        """Send a question under a new ticket and wait for the reply with the same one."""
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        ticket = next(self._tickets)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[ticket] = reply
        try:
            self._send(question(ticket))
            return await reply
        finally:
            self._replies.pop(ticket, None)

    def _send(self, command: Command) -> None:
        raise AssertionError("a transport must say how commands are sent")

    def _dispatch(self, messages: Iterable[Message]) -> None:
        """Take in what the engine sent."""
        for message in messages:
            if isinstance(message, Emission):
                self._deliver_step(message)
            elif isinstance(message, Output):
                self._deliver(message)
            elif isinstance(message, Published):
                self.published = message
            elif isinstance(message, Reply):
                reply = self._replies.pop(message.ticket, None)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            elif isinstance(message, Ready):
                self._info = message.info
                self._news.set()
            elif isinstance(message, Fatal):
                self._fail(ConfigError(message.message) if message.is_config else EngineDead(message.message))

    def _deliver_step(self, step: Emission[Output]) -> None:
        self._deliver_tokens(step)
        for output in step.finished:
            self._deliver(output)

    def _deliver_tokens(self, step: Emission[Output]) -> None:
        streams, limit = self._streams, self._max_buffer_bytes
        for id, token in zip(step.ids, step.tokens, strict=True):
            stream = streams.get(id)
            if stream is not None and stream.push_token(token) > limit:
                self._cut(stream)
        for id, entries in step.logprobs.items():
            stream = streams.get(id)
            if stream is not None and stream.push_logprobs(entries) > limit:
                self._cut(stream)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return
        stream.end(output)
        del self._streams[output.id]

    def _cut(self, stream: OutputStream) -> None:
        """Cut it off if its reader leaves that much in its turn; that frames came together is no fault of a reader."""
        if not self._overfull:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._cut_overfull)  # behind every reader that was woken in this turn
        self._overfull[stream.id] = stream

    def _cut_overfull(self) -> None:
        streams, self._overfull = self._overfull, {}
        for id, stream in streams.items():
            if self._streams.get(id) is stream and stream.num_bytes > self._max_buffer_bytes:
                self._cut_now(stream)

    def _cut_now(self, stream: OutputStream) -> None:
        self._give_up(stream.id)
        error = f"the client reads too slowly: more than {self._max_buffer_bytes} bytes waited for it"
        stream.cut(Output(stream.id, finish="error", error=error, code=SLOW_CONSUMER))

    def _give_up(self, id: int) -> None:
        self.abort(id)
        self._streams.pop(id, None)

    def _fail(self, failure: EngineDead | ConfigError) -> None:
        """The engine is gone: end every stream and every question."""
        if self._failure is not None:
            return
        self._failure = failure
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(Output(stream.id, finish="error", error=str(failure)))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDead(str(failure)))
        self._news.set()
        self._death.set()
