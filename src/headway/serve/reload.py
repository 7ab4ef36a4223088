"""SIGHUP: config file and keys file are read again, what changed is applied, and what cannot be is named in the log.

Only changes count: what was changed through the admin endpoint stays until the file says something new about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from headway.config import SchedulerConfig, ServeConfig
from headway.config_text import parse_options
from headway.engine.client import EngineClient, Settings
from headway.errors import ConfigError, EngineDead, EngineRestarting
from headway.serve.tenants import Tenants

log = logging.getLogger(__name__)

AGAIN_S = 0.2  # between two questions to an engine that is being replaced


class Reload:
    """Knows what the file said when it was last read; one reading at a time."""

    def __init__(
        self,
        config: ServeConfig,
        reread: Callable[[], ServeConfig] | None,
        client: EngineClient,
        tenants: Tenants | None = None,
    ) -> None:
        self._config = config
        self._reread = reread
        self._tenants = tenants
        self._client = client
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Called in the event loop when the signal has come."""
        task = asyncio.create_task(self.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Read, compare, apply, log."""
        async with self._one_at_a_time:
            try:
                await self._reload_keys()
            except ConfigError as error:
                log.error("SIGHUP: the keys are as they were: %s", error)
            except EngineDead as error:
                log.error("SIGHUP: the keys are those of the file, the weights of tenants are not: %s", error)
            try:
                await self._run()
            except (ConfigError, EngineDead) as error:
                log.error("SIGHUP: nothing was changed: %s", error)

    async def _reload_keys(self) -> None:
        keyring = None if self._tenants is None else self._tenants.reload()
        if keyring is None:
            return
        scheduler = self._config.engine.scheduler
        if scheduler.fair or scheduler.policy == "fair":
            await self._reconfigure({"tenant_weights": keyring.weights(scheduler.tenant_weights)})
        elif keyring.weights():
            log.warning("SIGHUP: weights of tenants count for nothing without --fair, which needs a restart")

    async def _reconfigure(self, changes: Settings) -> Settings:
        """Change settings of the engine of now, or of the next one if it is being replaced."""
        while True:
            try:
                return await self._client.reconfigure(changes)
            except EngineRestarting:
                await asyncio.sleep(AGAIN_S)

    async def _run(self) -> None:
        if self._reread is None:
            return
        new = await asyncio.to_thread(self._reread)
        can_change = await self._reconfigure({})
        changes = scheduler_changes(self._config.engine.scheduler, new.engine.scheduler)
        applied = {name: value for name, value in changes.items() if name in can_change}
        fixed = [*(name for name in changes if name not in can_change), *other_changes(self._config, new)]
        if applied:
            settings = await self._reconfigure(applied)
            said = ", ".join(f"{name} {can_change[name]!r} -> {settings[name]!r}" for name in applied)
            log.info("SIGHUP: changed %s", said)
            self._config = _with(self._config, new, applied)
        if fixed:
            log.warning("SIGHUP: not changed, since it needs a restart: %s", ", ".join(fixed))
        if not applied and not fixed:
            log.info("SIGHUP: the configuration is as it was")


def scheduler_changes(old: SchedulerConfig, new: SchedulerConfig) -> Settings:
    """What differs, by name; each option of the policy by its own."""
    changes: Settings = {}
    for name in (f.name for f in fields(SchedulerConfig)):
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if name != "policy_options":
            changes[name] = after
            continue
        had, has = parse_options(before, name), parse_options(after, name)
        changes |= {key: value for key, value in has.items() if had.get(key) != value}
        if had.keys() - has.keys():  # only a new policy knows the default of an option
            changes[name] = after
    return changes


def other_changes(old: ServeConfig, new: ServeConfig) -> list[str]:
    """Names of fields outside the scheduler that differ."""
    pairs: list[tuple[Any, Any]] = [
        (old.engine.model, new.engine.model),
        (old.engine.cache, new.engine.cache),
        (old.engine.sampling, new.engine.sampling),
        (old.server, new.server),
        (old.ray, new.ray),
    ]
    return [f.name for a, b in pairs for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]


def _with(old: ServeConfig, new: ServeConfig, applied: Settings) -> ServeConfig:
    """The old configuration with what was applied of the new one."""
    before, after = old.engine.scheduler, new.engine.scheduler
    names = {f.name for f in fields(SchedulerConfig)}
    taken = {name: getattr(after, name) for name in applied if name in names}
    if applied.keys() - names:
        taken["policy_options"] = after.policy_options
    return replace(old, engine=replace(old.engine, scheduler=replace(before, **taken)))
