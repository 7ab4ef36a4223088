"""Between a front end and an engine: predicts the answer length of each request and learns from its actual length.

Prompts are tokens here already, and no step waits for this code. `Forecast` has the two calls, for callers that drive
an engine themselves; `RankedClient` makes them around another client. Answered requests may also be recorded in a file,
with or without a ranker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from headway.config import SchedulerConfig
from headway.engine.client import CacheHit, EngineClient, EngineInfo, Output, OutputSource, Settings, Stats, Submit
from headway.engine.explain import Explanation
from headway.engine.published import Published
from headway.rank.features import Features
from headway.rank.log import Entry, Recorder
from headway.rank.online import Ranker, open_ranker

T = TypeVar("T")

_TEACHES = {"stop": False, "length": True, "abort": True}  # finish -> it was cut; others teach nothing


class _Prediction(NamedTuple):
    submit: Submit
    features: Features | None  # None: there is no ranker
    at: float


class Forecast:
    """Each `predict` is followed by one `end`; between them it keeps what the ranker saw of the request."""

    def __init__(
        self, ranker: Ranker | None, recorder: Recorder | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._ranker = ranker
        self._recorder = recorder
        self._clock = clock
        self._open: dict[int, _Prediction] = {}

    def predict(self, submit: Submit) -> Submit:
        """The request with the length its answer will probably have; as it was if the ranker has nothing to say."""
        ranker, features, expected = self._ranker, None, None
        if ranker is not None:
            features = ranker.features(submit.tokens, submit.tenant, submit.route, submit.params)
            expected = ranker.expect_of(features)
        self._open[submit.id] = _Prediction(submit, features, self._clock())
        if expected is None or submit.expected > 0:
            return submit
        return replace(submit, expected=expected.median, ceiling=expected.ceiling)

    def end(self, id: int, num_output: int, finish: str | None) -> None:
        """A request has ended; unknown ids are ignored."""
        opened = self._open.pop(id, None)
        if opened is None or finish not in _TEACHES:
            return
        if self._ranker is not None and opened.features is not None:
            self._ranker.learn(opened.features, num_output, _TEACHES[finish])
        if self._recorder is not None and num_output:
            self._recorder.record(partial(_entry, opened, num_output, finish))

    def settle(self) -> None:
        """Wait until all that ended so far is learned."""
        if self._ranker is not None:
            self._ranker.settle()

    def close(self) -> None:
        if self._ranker is not None:
            self._ranker.close()
        if self._recorder is not None:
            self._recorder.close()


def _entry(opened: _Prediction, num_output: int, finish: str) -> Entry:
    submit, params = opened.submit, opened.submit.params
    return Entry(
        tokens=list(submit.tokens),
        max_tokens=params.max_tokens,
        num_output=num_output,
        finish=finish,
        at=opened.at,
        tenant=submit.tenant,
        route=submit.route,
        temperature=params.temperature,
        has_stop=bool(params.stop),
        ignore_eos=params.ignore_eos,
    )


def open_forecast(wanted: SchedulerConfig) -> Forecast | None:
    """The ranker that the policy asks for and the log that is asked for; None if neither is."""
    recorder = Recorder(Path(wanted.rank_log).expanduser()) if wanted.rank_log else None
    try:
        ranker = open_ranker(wanted)
    except BaseException:
        if recorder is not None:
            recorder.close()
        raise
    return None if ranker is None and recorder is None else Forecast(ranker, recorder)


class _CountedStream:
    """A stream that counts its tokens."""

    def __init__(self, id: int, stream: OutputSource, end: Callable[[int, int, str], None]) -> None:
        self.num_tokens = 0
        self._id = id
        self._stream = stream
        self._end = end

    def __aiter__(self) -> _CountedStream:
        return self

    async def __anext__(self) -> Output:
        return self._counted(await self._stream.__anext__())

    def listen(self, told: Callable[[], None] | None) -> None:
        self._stream.listen(told)

    def take(self) -> Output | None:
        output = self._stream.take()
        return None if output is None else self._counted(output)

    def take_known(self, known: Mapping[int, T | None]) -> T | None:
        found = self._stream.take_known(known)
        self.num_tokens += found is not None
        return found

    def _counted(self, output: Output) -> Output:
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
    """An `EngineClient` that is another one, with a forecast in front of it."""

    def __init__(self, client: EngineClient, forecast: Forecast) -> None:
        self._client = client
        self._forecast = forecast
        self._open: dict[int, _CountedStream] = {}

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def dead(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        dead: str | None = getattr(self._client, "dead", None)
        return dead

    @property
    def published(self) -> Published | None:
        """What the engine said last about waiting times."""
        published: Published | None = getattr(self._client, "published", None)
        return published

    @property
    def recovering(self) -> float | None:
        """Seconds until an engine that has ended is probably replaced; None: none is to be."""
        wait_s: float | None = getattr(self._client, "recovering", None)
        return wait_s

    @property
    def hold_s(self) -> float:
        """How long a request that comes while `recovering` may be held for an engine; 0: it is refused at once."""
        hold_s: float = getattr(self._client, "hold_s", 0.0)
        return hold_s

    def end_all(self, reason: str = "abort") -> None:
        """End every stream now."""
        end_all = getattr(self._client, "end_all", None)
        if end_all is not None:
            end_all(reason)

    def submit(self, submit: Submit) -> _CountedStream:
        opened = self._forecast.predict(submit)
        try:
            stream = self._client.submit(opened)
        except BaseException:
            self._forecast.end(submit.id, 0, None)
            raise
        counted = self._open[submit.id] = _CountedStream(submit.id, stream, self._end)
        return counted

    def abort(self, id: int, reason: str = "abort") -> None:
        self._client.abort(id, reason)
        # A caller that aborts may stop reading. A stop string's abort is followed by the terminal output, which counts.
        if reason == "abort" and id in self._open:
            self._end(id, self._open[id].num_tokens, reason)

    async def stats(self) -> Stats:
        return await self._client.stats()

    async def explain(self, id: int) -> Explanation | None:
        return await self._client.explain(id)

    async def look_up(self, submit: Submit) -> CacheHit:
        return await self._client.look_up(submit)

    async def reconfigure(self, changes: Settings) -> Settings:
        return await self._client.reconfigure(changes)

    async def close(self) -> None:
        await self._client.close()
        self._forecast.close()

    def _end(self, id: int, num_output: int, finish: str) -> None:
        self._open.pop(id, None)
        self._forecast.end(id, num_output, finish)
