"""A fleet of engines behind one client: each request goes to one of them, and to another one if that ends.

    submit ─▶ route chooses a replica ─▶ its engine ─▶ tokens ─▶ stream
                    ▲                        │ its process ends
                    └── what it held ◀───────┘ goes on elsewhere, token for token; suspects of a crash wait for the next
                                               process of their own replica, so that no other engine crashes by them

One replica is the ordinary server. The fleet is dead once every replica has given up. Which replica holds which blocks
is in `index`, how one is chosen in `routes`, how a process is replaced in `engine.supervisor`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica, add_up, computes_as, split, sum_stats
from headway.cluster.routes._route import Route, new_tokens
from headway.cluster.routes.cost import CostRoute
from headway.cluster.routes.least_loaded import LeastLoadedRoute
from headway.config import EngineConfig
from headway.engine.client import CacheHit, Output, Settings, Stats, Submit
from headway.engine.explain import Explanation
from headway.engine.journal import OpenRequest
from headway.engine.messages import (
    BlockNews,
    Command,
    Explain,
    Explained,
    GetStats,
    LookedUp,
    LookUp,
    Message,
    Reconfigure,
    Reconfigured,
    Reply,
    StatsReply,
    WatchBlocks,
)
from headway.engine.process import CHILD, ChildCommand
from headway.engine.published import Published
from headway.engine.streams import INTERRUPTED, OutputStream, StreamClient
from headway.engine.supervision import Supervision
from headway.engine.supervisor import RESTARTING, SupervisedEngine
from headway.errors import ConfigError, EngineDead, EngineRestarting
from headway.values.plan import Emission

log = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks at a process that starts
_REMEMBERED = 4096  # requests whose replica is known after their end


class FleetClient(StreamClient):
    """Each open stream has its request with exactly one replica. `dead` is set once all replicas have given up."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        how: ChildCommand,
        rules: Supervision,
        *,
        route: Route | None = None,
        max_buffer_bytes: int = 1024 * 1024,
    ) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self._route = route or CostRoute()
        self._index = HolderIndex()
        self._home: dict[int, Replica] = {}  # of every open request
        self._was_at: dict[int, Replica] = {}  # of the last ones, also after their end
        self._asked: dict[int, SupervisedEngine] = {}  # by ticket
        self._published: Published | None = None
        self._is_stale = False  # a replica has published since
        self._last_id = 0
        self.replicas = [
            Replica(number, SupervisedEngine(config, how, rules, self, name=str(number)))
            for number, config in enumerate(configs)
        ]
        self._by_engine = {replica.engine: replica for replica in self.replicas}

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        num_replicas: int = 1,
        route: Route | None = None,
        command: Sequence[str] = CHILD,
        log_level: str = "info",
        log_format: str = "text",
        rules: Supervision | None = None,
        max_buffer_bytes: int = 1024 * 1024,
    ) -> FleetClient:
        """Start the engine processes and return at once; needs no event loop."""
        how = ChildCommand(command, log_level, log_format)
        configs = split(config, num_replicas)
        return cls(configs, how, rules or Supervision(), route=route, max_buffer_bytes=max_buffer_bytes)

    @property
    def pid(self) -> int | None:
        """Of the first replica's process; None between two of them."""
        return self.replicas[0].engine.pid

    @property
    def num_restarts(self) -> int:
        """Engine processes that were replaced."""
        return sum(replica.engine.num_restarts for replica in self.replicas)

    @property
    def recovering(self) -> float | None:
        """Seconds until requests are probably taken again; None while a replica takes them, or none was up yet."""
        if self._failure is not None or any(replica.engine.takes_requests for replica in self.replicas):
            return None
        return min((s for replica in self.replicas if (s := replica.engine.recovering) is not None), default=None)

    @property
    def published(self) -> Published | None:
        """What the replicas that take requests said last about waiting times, as if they were one engine."""
        if self._is_stale:
            self._is_stale = False
            said = [replica for replica in self.replicas if replica.engine.takes_requests and replica.published]
            if len(self.replicas) == 1:
                self._published = self.replicas[0].published
            else:
                self._published = add_up(said, self._last_id) if said else None
        return self._published

    @published.setter
    def published(self, value: Published | None) -> None:
        self._published = value  # the base class begins with None

    async def connect(self) -> None:
        """Begin to listen to the engines and to watch them, in the running event loop."""
        for replica in self.replicas:
            await replica.engine.connect()

    def submit(self, submit: Submit) -> OutputStream:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        assert submit.id not in self._streams, f"request id {submit.id} is in use"
        self._last_id = max(self._last_id, submit.id)
        self._place(OpenRequest(submit, time.monotonic()), is_new=True)
        stream = self._streams[submit.id] = OutputStream(submit.id, self._give_up)
        return stream

    def _ready(self) -> list[Replica]:
        """Replicas that take requests now; if there are none, those that will."""
        usable = [each for each in self.replicas if each.engine.failure is None]
        return [each for each in usable if each.engine.takes_requests] or usable

    def _place(self, entry: OpenRequest, *, is_new: bool, like: SupervisedEngine | None = None) -> None:
        """Give a request to one of the replicas; with `like`, to one that computes as that engine did."""
        submit = entry.submit
        ready = [each for each in self._ready() if like is None or computes_as(like, each.engine)]
        parent = None if submit.parent is None else self._home.get(submit.parent)
        if parent is not None and parent in ready:
            replica, num_new = parent, 0  # the prompt is computed there
        elif len(ready) == 1:
            replica, num_new = ready[0], len(submit.tokens)
        else:
            replica, num_new = self._choose(submit, [each for each in ready if each.has_room] or ready)
        replica.engine.take(entry, is_new=is_new)
        replica.sent(submit.id, num_new)
        self._home[submit.id] = replica
        self._is_stale = True

    def _choose(self, submit: Submit, replicas: Sequence[Replica]) -> tuple[Replica, int]:
        try:
            return self._route.choose(submit, replicas, self._index)
        except Exception:  # a plug-in's fault: no request is lost by it
            log.exception("the route failed; the least loaded replica gets the request")
            return LeastLoadedRoute().choose(submit, replicas, self._index)

    def _leave(self, id: int) -> None:
        """A request is over; which replica had it is remembered for a while."""
        home = self._home.pop(id, None)
        if home is not None:
            home.gone(id)
            self._was_at[id] = home
            if len(self._was_at) > _REMEMBERED:
                del self._was_at[next(iter(self._was_at))]

    def abort(self, id: int, reason: str = "abort") -> None:
        home = self._home.get(id)
        if home is not None:
            home.engine.abort(id, reason)

    def end_all(self, reason: str = "abort") -> None:
        for id in list(self._streams):
            self.abort(id, reason)
            if id in self._home:  # its engine has been told and may never answer
                self._home[id].engine.forget(id)
                self.request_ended(Output(id, finish=reason))

    def _give_up(self, id: int) -> None:
        super()._give_up(id)
        home = self._home.get(id)
        self._leave(id)
        if home is not None:
            home.engine.forget(id)

    async def close(self, grace_s: float = 5.0) -> None:
        """End the engines, whatever state they are in: no process is left when this returns."""
        await asyncio.gather(*(replica.engine.close(grace_s) for replica in self.replicas))
        self._fail(EngineDead("the engine was closed"))

    def _fail(self, failure: EngineDead | ConfigError) -> None:
        super()._fail(failure)
        self._home.clear()
        for replica in self.replicas:
            replica.engine.entries.clear()

    async def restart(self) -> None:
        """Replace the processes of all replicas, one after the other; what each holds goes on in the others."""
        for replica in self.replicas:
            engine = replica.engine
            log.info("replica %s gets another process", engine.name)
            engine.replace()
            while not engine.takes_requests and engine.failure is None and self._failure is None:
                await asyncio.sleep(_LOOK_S)

    def table(self) -> list[dict[str, object]]:
        """What there is to know about each replica."""
        held = self._index.num_blocks(len(self.replicas))
        return [
            {
                "replica": replica.number,
                "pid": replica.engine.pid,
                "is_up": replica.engine.takes_requests,
                "requests": len(replica.engine.entries),
                "prefill_tokens": replica.num_prefill,
                "cached_blocks": held[replica.number],
                "restarts": replica.engine.num_restarts,
                "failure": None if replica.engine.failure is None else str(replica.engine.failure),
            }
            for replica in self.replicas
        ]

    # Questions.

    async def stats(self) -> Stats:
        replies = await asyncio.gather(*(self._question(each, GetStats) for each in self._up()))
        found = [reply.stats for reply in replies if isinstance(reply, StatsReply)]
        total = found[0] if len(found) == 1 else sum_stats(found)
        replicas = {each.engine.name: len(each.engine.entries) for each in self.replicas if each.engine.is_up}
        return replace(total, restarts=self.num_restarts, replicas=replicas)

    async def reconfigure(self, changes: Settings) -> Settings:
        """All engines or none: the first one says whether the changes are sound; processes to come get them too."""
        first, *_ = self._up()
        reply = await self._question(first, lambda ticket: Reconfigure(ticket, changes))
        assert isinstance(reply, Reconfigured)
        if reply.error is not None:
            raise ConfigError(reply.error)
        for replica in self.replicas:
            replica.engine.settings |= changes
        for engine in [each.engine for each in self.replicas if each.engine.is_up and each.engine is not first]:
            with suppress(EngineRestarting):  # its next process begins with them
                await self._question(engine, lambda ticket: Reconfigure(ticket, changes))
        return reply.settings

    async def explain(self, id: int) -> Explanation | None:
        replica = self._home.get(id) or self._was_at.get(id)
        if len(self.replicas) == 1:
            replica = self.replicas[0]
        if replica is None or replica.engine.failure is not None:
            return None
        reply = await self._question(replica.engine, lambda ticket: Explain(ticket, id))
        assert isinstance(reply, Explained)
        return reply.explanation

    async def look_up(self, submit: Submit) -> CacheHit:
        """What the replica that has most of a prompt has of it."""
        ready = [each for each in self.replicas if each.engine.takes_requests]
        if not ready:
            raise EngineRestarting(RESTARTING)
        new = new_tokens(submit, ready, self._index)
        replica = ready[new.index(min(new))]
        reply = await self._question(replica.engine, lambda ticket: LookUp(ticket, submit))
        assert isinstance(reply, LookedUp)
        return reply.hit

    def _up(self) -> list[SupervisedEngine]:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        engines = [replica.engine for replica in self.replicas if replica.engine.is_up]
        if not engines:
            raise EngineRestarting(RESTARTING)
        return engines

    async def _question(self, engine: SupervisedEngine, question: Callable[[int], Command]) -> Reply:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        ticket = next(self._tickets)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[ticket], self._asked[ticket] = reply, engine
        try:
            engine.send(question(ticket))
            return await reply
        finally:
            self._replies.pop(ticket, None)
            self._asked.pop(ticket, None)

    # What engines tell.

    def engine_up(self, engine: SupervisedEngine) -> None:
        replica = self._by_engine[engine]
        replica.renew()
        self._is_stale = True
        assert engine.info is not None
        infos = [each.engine.info for each in self.replicas if each.engine.info is not None]
        num_slots, num_blocks = engine.info.max_num_seqs * len(self.replicas), min(each.num_blocks for each in infos)
        self._info = replace(engine.info, max_num_seqs=num_slots, num_blocks=num_blocks)
        if len(self.replicas) > 1:
            engine.send(WatchBlocks())
            for other in self.replicas:
                if other.engine.is_between:  # what it holds need not wait for its next process
                    self._move(other.engine)
        self._note_start()

    def _note_start(self) -> None:
        """The fleet is ready once every replica is up or given up."""
        if all(each.engine.info is not None or each.engine.failure is not None for each in self.replicas):
            self._news.set()

    def engine_lost(self, engine: SupervisedEngine) -> None:
        replica = self._by_engine[engine]
        replica.renew()
        self._index.drop(replica.number)
        self._is_stale = True
        for ticket, asked in self._asked.items():
            reply = self._replies.get(ticket)
            if asked is engine and reply is not None and not reply.done():
                reply.set_exception(EngineRestarting(RESTARTING))

    def engine_ended(self, engine: SupervisedEngine) -> None:
        """Requests go on elsewhere at once, if there is an engine that takes them."""
        if any(each.engine.takes_requests for each in self.replicas if each.engine is not engine):
            self._move(engine)

    def _move(self, engine: SupervisedEngine) -> None:
        """To replicas that take requests; what has begun only to those that compute as the engine did."""
        moved = engine.give_away()
        for entry in moved:
            finish = entry.finish(self.info.eos_ids) if entry.tokens else None
            if finish is not None:
                self.request_ended(entry.settle(Output(entry.submit.id, finish=finish), time.monotonic()))
            elif entry.tokens and not any(computes_as(engine, each.engine) for each in self._ready()):
                why = "this answer was cut off: no engine that is left computes as the one that ended"
                self.request_ended(Output(entry.submit.id, finish="error", error=why, code=INTERRUPTED))
            else:
                self._place(entry, is_new=False, like=engine if entry.tokens else None)
        if moved:
            log.warning("%d requests of replica %s go on elsewhere", len(moved), engine.name)

    def keeps_engine(self, engine: SupervisedEngine) -> bool:
        """One that was up before is tried again and again while another one serves."""
        return engine.info is not None and any(each.engine.takes_requests for each in self.replicas)

    def engine_failed(self, engine: SupervisedEngine, failure: EngineDead | ConfigError) -> None:
        others = [each for each in self.replicas if each.engine.failure is None]
        if not others or isinstance(failure, ConfigError):
            self._fail(failure)
            return
        log.error("replica %s is given up: %s; %d are left", engine.name, failure, len(others))
        self._note_start()
        self._move(engine)
        for id in list(engine.entries):  # suspects of the crashes that it did not survive
            engine.forget(id)
            self.request_ended(Output(id, finish="error", error=str(failure)))

    def step_done(self, step: Emission[Output]) -> None:
        self._deliver_tokens(step)

    def request_ended(self, output: Output) -> None:
        self._leave(output.id)
        self._deliver(output)

    def engine_said(self, engine: SupervisedEngine, message: Message) -> None:
        replica = self._by_engine[engine]
        if isinstance(message, Published):
            replica.take(message)
            self._is_stale = True
        elif isinstance(message, BlockNews):
            self._index.change(replica.number, message.added, message.removed)
        else:
            self._dispatch((message,))
