"""What is asked of a fleet: numbers, settings, why a request waited, what the caches have of a prompt.

A question goes to the engines that can answer it and fails if theirs ends meanwhile. `client` adds requests to this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica, sum_stats
from headway.cluster.routes._route import new_tokens
from headway.engine.client import CacheHit, Settings, Stats, Submit
from headway.engine.explain import Explanation, RouteNote
from headway.engine.holder import RESTARTING, RequestHolder
from headway.engine.messages import (
    Command,
    Explain,
    Explained,
    GetStats,
    LookedUp,
    LookUp,
    Reconfigure,
    Reconfigured,
    Reply,
    StatsReply,
)
from headway.engine.streams import StreamClient
from headway.errors import ConfigError, EngineDead, EngineRestarting


class FleetQuestions(StreamClient):
    """`replicas` are those of now; each question is with one engine, or one with each."""

    def __init__(self, *, max_buffer_bytes: int = 1024 * 1024) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self.replicas: list[Replica] = []
        self._index = HolderIndex()
        self._home: dict[int, Replica] = {}  # of every open request
        self._was_at: dict[int, Replica] = {}  # of the last ones, also after their end
        self._routed: dict[int, RouteNote] = {}  # likewise
        self._settings: Settings = {}  # what was changed: engines that join later get it too
        self._asked: dict[int, RequestHolder] = {}  # by ticket

    @property
    def num_restarts(self) -> int:
        """Engine processes that were replaced."""
        return sum(replica.engine.num_restarts for replica in self.replicas)

    def table(self) -> list[dict[str, object]]:
        """What there is to know about each replica."""
        held = self._index.num_blocks(max((each.number for each in self.replicas), default=-1) + 1)
        return [
            {
                "replica": replica.number,
                "name": replica.engine.name,
                "where": replica.engine.where,
                "pid": replica.engine.pid,
                "role": "both" if replica.engine.info is None else replica.engine.info.role,
                "is_up": replica.engine.takes_requests,
                "health": replica.health,
                "requests": len(replica.engine.entries),
                "prefill_tokens": replica.num_prefill,
                "cached_blocks": held[replica.number],
                "num_blocks": 0 if replica.engine.info is None else replica.engine.info.num_blocks,
                "restarts": replica.engine.num_restarts,
                "failure": None if replica.engine.failure is None else str(replica.engine.failure),
            }
            for replica in self.replicas
        ]

    async def stats(self) -> Stats:
        asking = (self._question(each, GetStats) for each in self._up())
        replies = await asyncio.gather(*asking, return_exceptions=True)
        if all(isinstance(reply, EngineRestarting) for reply in replies):
            raise EngineRestarting(RESTARTING)
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
        self._settings |= changes
        for replica in self.replicas:
            replica.engine.settings |= changes
        for engine in [each.engine for each in self.replicas if each.engine.is_up and each.engine is not first]:
            with suppress(EngineRestarting):  # its next process begins with them
                await self._question(engine, lambda ticket: Reconfigure(ticket, changes))
        return reply.settings

    async def explain(self, id: int) -> Explanation | None:
        replica = self._home.get(id) or self._was_at.get(id)
        if replica is None and len(self.replicas) == 1:
            replica = self.replicas[0]
        if replica is None or replica.engine.failure is not None or replica not in self.replicas:
            return None
        reply = await self._question(replica.engine, lambda ticket: Explain(ticket, id))
        assert isinstance(reply, Explained)
        told, routed = reply.explanation, self._routed.get(id)
        if told is None or routed is None or len(self.replicas) < 2:
            return told
        return replace(told, routed=routed)

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

    def _up(self) -> list[RequestHolder]:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        engines = [replica.engine for replica in self.replicas if replica.engine.is_up]
        if not engines:
            raise EngineRestarting(RESTARTING)
        return engines

    async def _question(self, engine: RequestHolder, question: Callable[[int], Command]) -> Reply:
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
