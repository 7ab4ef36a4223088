"""Between a front end and an engine: says of each request how long its answer will get, and learns how long it got.

This is where prompts are tokens already and nobody waits for a step. `Forecast` is the two calls by themselves, for
whoever drives an engine; `RankedClient` makes them around another client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from headway.engine.client import EngineClient, EngineInfo, Output, Settings, Stats, Submit
from headway.rank.features import Features
from headway.rank.online import Ranker

_TEACHES = {"stop": False, "length": True, "abort": True}  # finish -> it was cut; others teach nothing


class Forecast:
    """Each `tell` is followed by one `end`; between them it keeps what the ranker saw of the request."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker
        self._open: dict[int, Features] = {}

    def tell(self, submit: Submit) -> Submit:
        """The request with the length its answer will probably have; as it was if the ranker has nothing to say."""
        features = self._ranker.features(submit.tokens, submit.tenant, submit.route, submit.params)
        self._open[submit.id] = features
        expected = self._ranker.expect_of(features)
        if expected is None or submit.expected > 0:
            return submit
        return replace(submit, expected=expected.median, ceiling=expected.ceiling)

    def end(self, id: int, num_output: int, finish: str | None) -> None:
        """A request has ended; unknown ids are ignored."""
        features = self._open.pop(id, None)
        if features is not None and finish in _TEACHES:
            self._ranker.learn(features, num_output, _TEACHES[finish])

    def close(self) -> None:
        self._ranker.close()


class _Watched:
    """A stream that counts its tokens."""

    def __init__(self, id: int, stream: AsyncIterator[Output], end: Callable[[int, int, str], None]) -> None:
        self.num_tokens = 0
        self._id = id
        self._stream = stream
        self._end = end

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Output:
        output = await self._stream.__anext__()
        self.num_tokens += len(output.tokens)
        if output.finish is not None:
            self._end(self._id, self.num_tokens, output.finish)
        return output

    async def aclose(self) -> None:
        """Give up: the answer was cut here."""
        self._end(self._id, self.num_tokens, "abort")
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()


class RankedClient:
    """An `EngineClient` that is another one, with a ranker in front of it."""

    def __init__(self, client: EngineClient, ranker: Ranker) -> None:
        self._client = client
        self._forecast = Forecast(ranker)
        self._open: dict[int, _Watched] = {}

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def dead(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        dead: str | None = getattr(self._client, "dead", None)
        return dead

    def submit(self, submit: Submit) -> _Watched:
        stream = self._client.submit(self._forecast.tell(submit))
        watched = self._open[submit.id] = _Watched(submit.id, stream, self._end)
        return watched

    def abort(self, id: int, reason: str = "abort") -> None:
        self._client.abort(id, reason)
        # Whoever gives up need not read on. A stop string's abort is followed by the terminal output, which counts.
        if reason == "abort" and id in self._open:
            self._end(id, self._open[id].num_tokens, reason)

    async def stats(self) -> Stats:
        return await self._client.stats()

    async def reconfigure(self, changes: Settings) -> Settings:
        return await self._client.reconfigure(changes)

    async def close(self) -> None:
        await self._client.close()
        self._forecast.close()

    def _end(self, id: int, num_output: int, finish: str) -> None:
        self._open.pop(id, None)
        self._forecast.end(id, num_output, finish)
