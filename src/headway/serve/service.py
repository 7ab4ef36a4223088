"""What the routes use: the engine client, the text pipeline, and the server's own state.

    LOADING ──open──▶ READY ◀──▶ RECOVERING ──drain──▶ DRAINING     an engine that is given up makes any of them DEAD

`Service` owns which requests are under way and whether new ones are taken. It knows no HTTP beyond the
exceptions it raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Protocol

from headway.config import ServerConfig
from headway.engine.client import EngineClient, EngineInfo, Stats
from headway.engine.published import Published
from headway.engine.streams import HOLD_S
from headway.errors import EngineDead
from headway.grammar.check import GrammarChecker
from headway.serve.body import BodyDecoder
from headway.serve.embedder import ServedEmbedder
from headway.serve.formats import JsonTexts
from headway.serve.history import History
from headway.serve.intake import BodyIntake
from headway.serve.metrics import Metrics
from headway.serve.overload import QueueGuard
from headway.serve.problem import Problem, not_ready
from headway.serve.pump import Pump
from headway.serve.tenants import Tenants
from headway.serve.tracing import Tracing
from headway.serve.turns import FairTurns
from headway.text.breakers import BreakerTokens
from headway.text.chat import ChatTemplate
from headway.text.defaults import SamplingDefaults
from headway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# How long the events that say that an answer was cut off may take to be written.
_LAST_EVENTS_S = 0.3
_LOOK_S = 0.02  # between two looks whether an engine is back, however many requests wait for it


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DEAD = "dead"


class ServingClient(EngineClient, Protocol):
    """An engine client that can say whether its engine still lives."""

    @property
    def dead(self) -> str | None:
        """Why the engine is gone; None while it lives."""

    @property
    def published(self) -> Published | None:
        """What the engine said last about waiting times; None if it never did."""

    @property
    def recovering(self) -> float | None:
        """Seconds until an engine that has ended is probably replaced; None: none is to be."""

    @property
    def hold_s(self) -> float:
        """How long a request that comes while `recovering` may be held for an engine; 0: it is refused at once."""

    def end_all(self, reason: str = "abort") -> None:
        """End every stream now, whether or not the engine still answers."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: present once the engine is ready."""

    name: str
    client: ServingClient
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    grammars: GrammarChecker | None = None  # None: no answer can be held to a grammar
    adapter: str = ""  # of the model's adapters, the one that answers; empty: the model itself
    json_texts: JsonTexts = field(init=False)  # of tokens that are whole by themselves
    breakers: BreakerTokens = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_texts", JsonTexts(self.tokenizer.whole_texts))
        object.__setattr__(self, "breakers", BreakerTokens(self.tokenizer))


class Service:
    """New work begins in READY alone; every begun piece of work is in `_working` until it ends."""

    def __init__(self, config: ServerConfig, tenants: Tenants | None = None) -> None:
        self.config = config
        self.tenants = tenants or Tenants(config)
        self.metrics = Metrics()
        self.pump = Pump(self.metrics.settle)
        self.history = History()
        self.tracing = None if config.otlp_endpoint is None else Tracing(config.otlp_endpoint)
        self.guard = QueueGuard(config.max_queue_s)
        self.bodies = BodyDecoder(is_strict=config.strict_fields)
        self.intake = BodyIntake()
        self.turns = FairTurns()
        self.checks = FairTurns()  # of grammars: a check may take seconds, and nothing else waits behind it
        self.questions = asyncio.Lock()  # held while the engine is asked why, or what it has
        self.embedder: ServedEmbedder | None = None  # None: no model makes vectors here
        self._model: ServedModel | None = None
        self._client: ServingClient | None = None
        self._is_draining = False
        self._num_working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open_ids: set[int] = set()
        self._coming_back: asyncio.Task[None] | None = None  # what requests that are held wait for
        self._leftovers: set[asyncio.Task[None]] = set()
        self._ids = count(1)

    @property
    def phase(self) -> Phase:
        if self._client is not None and self._client.dead is not None:
            return Phase.DEAD
        if self._is_draining:
            return Phase.DRAINING
        if self._model is None:
            return Phase.LOADING
        return Phase.READY if self._model.client.recovering is None else Phase.RECOVERING

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the engine, from the moment it is ready and even after its end."""
        return None if self._model is None else self._model.client.info

    @property
    def model_or_none(self) -> ServedModel | None:
        """The served model, whether or not requests are taken; None until it is there."""
        return self._model

    def watch(self, client: ServingClient) -> None:
        """Notice this engine's death even before the model is open."""
        self._client = client

    def open(self, model: ServedModel) -> None:
        """The engine is ready: take requests."""
        self._client = model.client
        self._model = model
        self.metrics.info = model.client.info

    def close(self) -> None:
        """Nothing is served any more: end the template's processes, send the last traces."""
        self.turns.close()
        self.checks.close()
        if self.tracing is not None:
            self.tracing.close()
        if self._model is not None:
            self._model.template.close()
            if self._model.grammars is not None:
                self._model.grammars.close()

    def model(self) -> ServedModel:
        """The served model, or 503."""
        phase = self.phase
        if phase is Phase.DEAD:
            raise EngineDead("the engine has ended")
        if phase is Phase.DRAINING:
            raise not_ready("the server is shutting down")
        if self._model is None:
            raise not_ready("the model is still loading; try again in a few seconds, GET /ready says when it is ready")
        if phase is Phase.RECOVERING:
            raise self.recovering()
        return self._model

    async def model_soon(self) -> ServedModel:
        """As `model`; where another engine is likely to be there in a moment, the request is held for it."""
        if self.phase is Phase.RECOVERING:
            if self._coming_back is None or self._coming_back.done():
                self._coming_back = asyncio.get_running_loop().create_task(self._come_back())
            await asyncio.wait([self._coming_back], timeout=HOLD_S)
        return self.model()

    async def _come_back(self) -> None:
        while self._model is not None and self.phase is Phase.RECOVERING and self._model.client.hold_s > 0:
            await asyncio.sleep(_LOOK_S)

    def recovering(self) -> Problem:
        """What a request is told while another engine starts."""
        wait_s = None if self._model is None else self._model.client.recovering
        return not_ready("the engine is being restarted; begun answers go on when it is back", wait_s or 1.0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around everything a drain must wait for."""
        self._num_working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_working -= 1
            if not self._num_working:
                self._idle.set()

    def new_id(self) -> int:
        """An id for the engine; never one that a client chose."""
        id = next(self._ids)
        self._open_ids.add(id)
        return id

    def release(self, id: int) -> None:
        """An answer has ended or is not wanted any more."""
        self.guard.begun(id)
        if id in self._open_ids:
            self._open_ids.discard(id)
            if self._client is not None:
                self._client.abort(id)

    def look_after(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that no request waits for and that ends with the engine's next word."""
        task = asyncio.get_running_loop().create_task(work)
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)

    def settled(self, id: int) -> None:
        """An answer got its terminal output."""
        self.guard.begun(id)
        self._open_ids.discard(id)

    async def stats(self, timeout_s: float = 2.0) -> Stats:
        """The engine's numbers, or the last known ones if it is busy or gone."""
        if self._client is not None and self._client.dead is None and self._model is not None:
            try:
                async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 may swallow a cancellation
                    self.metrics.stats = await self._client.stats()
            except (TimeoutError, EngineDead):
                log.debug("no numbers from the engine; the last known ones are used")
        return self.metrics.stats

    def begin_drain(self) -> None:
        """Take no new work from now on."""
        self._is_draining = True

    async def drain(self, grace_s: float) -> bool:
        """Let begun work finish within `grace_s`, then abort the rest with an error; True if all finished."""
        self.begin_drain()
        if await self._wait_idle(grace_s):
            return True
        log.warning("%d requests did not finish in time and are aborted", self._num_working)
        self.abort_all()
        await self._wait_idle(_LAST_EVENTS_S)
        return False

    def abort_all(self) -> None:
        """End every answer now, even if the engine does not react any more; each client gets an error."""
        if self._client is not None:
            self._client.end_all()
        if self.embedder is not None:
            self.embedder.client.end_all()

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
