"""Adapters of one engine: loaded beside its steps, named by requests, unloaded when none has them.

    load ─▶ read on a thread, checked ─▶ put between two steps ─▶ in `EngineInfo.adapters`, with its digest ─▶ reply

The digest is what the cache's keys are made with: blocks of a name that was loaded again with other weights are never
found, nor those of another engine. While a live request names an adapter it is not unloaded: who asks has its own
requests end before, and is told how many there are. What an adapter is, the executor knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.config_text import ADAPTER_NAME, AdapterSource
from headway.engine.executor import AdapterMemory, ReadAdapter
from headway.engine.messages import AdaptersNow, LoadAdapter, UnloadAdapter
from headway.errors import ConfigError
from headway.values.states import State

if TYPE_CHECKING:
    from headway.engine.engine import Engine

log = logging.getLogger(__name__)


class EngineAdapters:
    """`EngineInfo.adapters` of its engine is what the executor's rows may name now."""

    def __init__(self, engine: Engine, memory: AdapterMemory | None, device: str) -> None:
        self._engine = engine
        self._memory = memory
        self._device = device  # for people, where there is no memory for adapters
        self._reading: list[tuple[LoadAdapter, Future[ReadAdapter]]] = []
        self._reader: ThreadPoolExecutor | None = None
        self._wake: Callable[[], None] = lambda: None

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when an adapter is read."""
        self._wake = wake

    def load_now(self, source: AdapterSource) -> None:
        """Read and put it before this returns: for an engine that serves no requests meanwhile."""
        self.put(source, self._require_memory(source.name).read(source.path))

    def apply(self, command: LoadAdapter | UnloadAdapter) -> list[AdaptersNow]:
        """Do it, or begin to: the reply to a load comes from `done`."""
        try:
            if isinstance(command, UnloadAdapter):
                self.unload(command.name)
                return [self._reply(command.ticket)]
            memory = self._require_memory(command.name)
        except ConfigError as error:
            return [self._reply(command.ticket, str(error))]
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "headway-adapters")
        reading = self._reader.submit(memory.read, command.path)
        self._reading.append((command, reading))
        reading.add_done_callback(lambda _: self._wake())
        return []

    def done(self) -> list[AdaptersNow]:
        """Put what has been read since; the replies."""
        replies: list[AdaptersNow] = []
        while self._reading and self._reading[0][1].done():
            command, reading = self._reading.pop(0)
            try:
                self.put(AdapterSource(command.name, command.path, command.digest), reading.result())
                replies.append(self._reply(command.ticket))
            except ConfigError as error:
                replies.append(self._reply(command.ticket, str(error)))
            except Exception as error:  # a fault of ours: the engine goes on without this adapter
                log.exception("adapter %s could not be loaded", command.name)
                replies.append(self._reply(command.ticket, f"it could not be loaded: {error!r}"))
        return replies

    def unload(self, name: str) -> None:
        """Free it; ConfigError while requests have it, or if there is none."""
        memory, info = self._require_memory(name), self._engine.info
        if name not in info.adapters:
            raise ConfigError(f"adapter {name!r} is not loaded; there are: {', '.join(info.adapters) or 'none'}")
        live = [*self._engine.scheduler.state.live.values(), *self._engine.entering]
        num_users = sum(req.adapter == name and req.state is not State.HELD for req in live)
        if num_users:
            raise ConfigError(f"adapter {name!r} is in use by {num_users} requests; unload it when they have ended")
        memory.drop(name)
        left = {other: digest for other, digest in info.adapters.items() if other != name}
        self._engine.info = replace(info, adapters=left)
        log.info("adapter %s unloaded", name)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def put(self, source: AdapterSource, read: ReadAdapter) -> None:
        """Requests that come from now on may name it."""
        name, info = source.name, self._engine.info
        if source.digest not in ("", read.digest):
            raise ConfigError(f"adapter {name!r}: {source.path} has the digest {read.digest}, not {source.digest}")
        known = info.adapters.get(name)
        if known is not None and known != read.digest:
            raise ConfigError(f"adapter {name!r} is loaded with other weights; unload it first, or take another name")
        if known is None:
            self._require_memory(name).put(name, read)
            self._engine.info = replace(info, adapters={**info.adapters, name: read.digest})
            log.info("adapter %s loaded: %d bytes, digest %s", name, read.num_bytes, read.digest)

    def _require_memory(self, name: str) -> AdapterMemory:
        if self._memory is None:
            raise ConfigError(f"adapters run on device cpu in one process (tensor_parallel 1), not on {self._device}")
        if ADAPTER_NAME.fullmatch(name) is None or name == self._engine.info.model:
            raise ConfigError(
                f"an adapter cannot be called {name!r:.150}; allowed: letters, digits, _, ., / and -, up to 128, and "
                "another name than the model's"
            )
        return self._memory

    def _reply(self, ticket: int, error: str | None = None) -> AdaptersNow:
        return AdaptersNow(ticket, self._engine.info.adapters, error)
