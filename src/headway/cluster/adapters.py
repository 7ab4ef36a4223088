"""The adapters of a fleet: every engine gets what is loaded, and a request goes only where its adapter is.

Loading is all or none. Unloading takes the name away from new requests at once and waits for those that have it. What
was loaded while engines run belongs to the next process of each too; one that comes up without it is given it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from headway.cluster.joined import JoinedEngine
from headway.cluster.questions import FleetQuestions
from headway.cluster.replica import Replica
from headway.config_text import AdapterSource
from headway.engine.holder import RequestHolder
from headway.engine.journal import OpenRequest
from headway.engine.messages import AdaptersNow, Command, LoadAdapter, UnloadAdapter
from headway.engine.supervisor import SupervisedEngine
from headway.errors import ConfigError, EngineError, EngineRestarting, RequestError

log = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks at requests that are to end


class FleetAdapters(FleetQuestions):
    """`info.adapters` has what requests may name: what an engine has and is not about to be unloaded."""

    def __init__(self, *, max_buffer_bytes: int = 1024 * 1024) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self._own: list[SupervisedEngine] = []
        self._sources: dict[str, AdapterSource] = {}  # of adapters that were loaded while the fleet runs
        self._leaving: set[str] = set()
        self._change = asyncio.Lock()  # one load or unload at a time

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter into all engines or none; RequestError says what is wrong with it."""
        async with self._change:
            done: list[RequestHolder] = []
            source = AdapterSource(name, path)
            try:
                for engine in self._up():
                    had = engine.info is not None and name in engine.info.adapters
                    source = _pinned(source, await self._load(engine, source))
                    done += [] if had else [engine]
            except EngineError:
                for engine in done:
                    with suppress(EngineError):
                        await self._told(engine, lambda ticket: UnloadAdapter(ticket, name))
                raise
            self._sources[name] = source
            for replica in self.replicas:
                replica.engine.adapter_paths[name] = path
                if replica.engine.is_up:
                    self._catch_up(replica.engine)  # if it came while others loaded it
            self._sum_info()

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter from new requests, wait for those that have it, and free it everywhere."""
        async with self._change:
            if name not in self.info.adapters:
                raise RequestError(self._unknown(name), param="lora_name", code="model_not_found")
            self._leaving.add(name)
            self._sum_info()
            try:
                while any(self._users(name)) or self._is_being_read(name):
                    await asyncio.sleep(_LOOK_S)
                for engine in self._up():
                    if engine.info is not None and name in engine.info.adapters:
                        await self._told(engine, lambda ticket: UnloadAdapter(ticket, name))
                self._sources.pop(name, None)
                for replica in self.replicas:
                    replica.engine.adapter_paths.pop(name, None)
            finally:
                self._leaving.discard(name)
                self._sum_info()

    def _users(self, name: str) -> list[int]:
        entries = (entry for replica in self.replicas for entry in replica.engine.entries.values())
        return [entry.submit.id for entry in entries if entry.submit.adapter == name]

    def _is_being_read(self, name: str) -> bool:
        return any(each.engine.is_up and name in each.engine.awaited.values() for each in self.replicas)

    async def _load(self, engine: RequestHolder, source: AdapterSource) -> str:
        """The digest of what it loaded."""
        load = await self._told(engine, lambda ticket: LoadAdapter(ticket, source.name, source.path, source.digest))
        return load.adapters[source.name]

    async def _told(self, engine: RequestHolder, question: Callable[[int], Command]) -> AdaptersNow:
        reply = await self._question(engine, question)
        assert isinstance(reply, AdaptersNow)
        if reply.error is not None:
            raise RequestError(f"nothing was changed: {reply.error}", param="lora_name", code="invalid_value")
        return reply

    def _note_adapters(self, engine: RequestHolder, now: AdaptersNow) -> None:
        """What an engine has from now on."""
        if engine.info is not None:
            engine.info = replace(engine.info, adapters=dict(now.adapters))
        name = engine.awaited.pop(now.ticket, None)
        if name is not None and now.error is not None:
            log.warning("replica %s lacks adapter %s: %s", engine.name, name, now.error)
        self._sum_info()
        self._pass_on_lacking(engine)
        engine.resume()

    def _pass_on(self, engine: RequestHolder, moved: Sequence[OpenRequest]) -> None:
        """Have requests that an engine gave back go on elsewhere."""
        raise NotImplementedError

    def _pass_on_lacking(self, engine: RequestHolder) -> None:
        """An engine that joined gets no requests for adapters that it has not and will not have."""
        if isinstance(engine, JoinedEngine) and engine.info is not None:
            names = {"", *engine.info.adapters, *engine.awaited.values()}
            waiting = [(id, each) for id, each in sorted(engine.entries.items()) if not each.is_sent]
            self._pass_on(engine, engine.take_back([id for id, each in waiting if each.submit.adapter not in names]))

    def _catch_up(self, engine: RequestHolder) -> None:
        """Give an engine that is up what was loaded before; requests by it wait there until it has it."""
        known = engine.awaited.values()
        for name, source in self._sources.items():
            engine.adapter_paths[name] = source.path
            has = engine.info is None or name in engine.info.adapters or name in known
            if not has and name not in self._leaving:
                with suppress(EngineRestarting):
                    engine.send(LoadAdapter(ticket := next(self._tickets), name, source.path, source.digest))
                    engine.awaited[ticket] = name
        self._pass_on_lacking(engine)

    def _with_adapter(self, replicas: list[Replica], name: str) -> list[Replica]:
        """Those that have a request's adapter, or may have it when they are up."""
        if not name:
            return replicas
        found = [each for each in replicas if each.engine.info is None or name in each.engine.info.adapters]
        found = found or [each for each in replicas if name in each.engine.awaited.values()]
        if not found or name in self._leaving:
            raise RequestError(self._unknown(name), param="model", code="model_not_found")
        return found

    def _unknown(self, name: str) -> str:
        return f"there is no adapter {name!r:.150}; there are: {', '.join(self.info.adapters) or 'none'}"

    def _sum_info(self) -> None:
        """Facts about all engines together, as far as they are here."""
        infos = [each.engine.info for each in self.replicas if each.engine.info is not None]
        awaited = {name for each in self.replicas for name in each.engine.awaited.values()}
        if infos:
            num_slots = sum(each.max_num_seqs for each in infos)
            num_slots = max(num_slots, infos[0].max_num_seqs * len(self._own))  # those that still start are alike
            self._info = replace(
                infos[0],
                max_num_seqs=num_slots,
                num_blocks=min(each.num_blocks for each in infos),
                adapters={
                    name: digest
                    for adapters in (
                        {name: self._sources[name].digest for name in awaited & self._sources.keys()},
                        *(info.adapters for info in infos),
                    )
                    for name, digest in adapters.items()
                    if name not in self._leaving
                },
            )


def _pinned(source: AdapterSource, digest: str) -> AdapterSource:
    """The same, and only what has this digest."""
    if source.digest not in ("", digest):
        raise ConfigError(f"adapter {source.name!r} is not the same on all engines: {digest}, not {source.digest}")
    return source._replace(digest=digest)
