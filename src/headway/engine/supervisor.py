"""One engine that does not end: processes come and go, the requests it holds go on.

    start ─▶ UP ──death or stall──▶ reap, log, blame ─▶ back off ─▶ start another ─▶ UP: submit again what is open
                                        └─ the third death in a row without a committed step ─▶ give up

`SupervisedEngine` holds requests between submit and terminal output; its owner has their streams, and may give it
requests and take them away. What is submitted again is in `journal`, which requests are kept apart after a second crash
in `suspects`, what is a stall in `watchdog`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from headway.config import EngineConfig
from headway.config_text import AdapterSource, parse_adapters
from headway.engine.client import EngineInfo, Output, Submit
from headway.engine.holder import RESTARTING, RequestHolder
from headway.engine.messages import Command, Fatal, Message, Ready, Reconfigure
from headway.engine.process import ChildCommand, EngineProcess, ending, num_out_of_memory
from headway.engine.supervision import EngineOwner, Supervision
from headway.engine.watchdog import Stall, Watchdog, look_at
from headway.errors import ConfigError, EngineDead, EngineRestarting
from headway.values.plan import Emission

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # between two looks of the watchdog, at most
_EXIT_S = 2.0  # for a process whose connection has closed to end by itself, with its own exit code
_BARREN = 4  # engines killed from outside that gave a request no token before it is suspected all the same
_LONGEST_S = 30.0  # between two starts
_MOST_BLAMED = 5  # in a row, without a committed step: then the engine is to blame


class SupervisedEngine(RequestHolder):
    """`entries` are the requests that it holds, by id. `failure` is set once it has given up."""

    def __init__(
        self, config: EngineConfig, how: ChildCommand, rules: Supervision, owner: EngineOwner, name: str = ""
    ) -> None:
        super().__init__(owner, name)
        self._config = config
        self._how = how
        self._rules = rules
        self._is_asked = False  # its process was ended by `replace`
        self._last_words = ""
        self._num_deaths = 0  # in a row, without a committed step
        self._num_blamed = 0  # likewise
        self._num_killed = num_out_of_memory()
        self._start_s = 2.0  # how long the last recovery took
        self._down_since = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: set[EngineProcess] = set()  # not reaped yet
        self._engine: EngineProcess | None = EngineProcess.start(config, how)  # at once; this needs no event loop

    @property
    def pid(self) -> int | None:
        """Of its process; None between two of them."""
        return None if self._engine is None else self._engine.pid

    @property
    def recovering(self) -> float | None:
        """Seconds until requests are probably taken again; None while they are, or before its first process was up."""
        if self.info is None or self.failure is not None or self.takes_requests:
            return None
        return max(0.0, self._start_s - (time.monotonic() - self._down_since))

    async def connect(self) -> None:
        """Begin to listen to its process and to watch it, in the running event loop."""
        assert self._engine is not None
        await self._listen(self._engine)
        if self._rules.stall_s > 0:
            self._spawn(self._watch())

    def send(self, command: Command) -> None:
        if self._engine is None or not self.is_up:
            raise EngineRestarting(RESTARTING)
        self._engine.send(command)

    def replace(self) -> None:
        """End its process and start another one, as if it had been killed; nothing happens between two processes."""
        if self._engine is not None and self.is_up:
            self._is_asked = True
            self._lost("another one was asked for", None)

    def retire(self) -> None:
        """Listen to its process no more, and start no other; `close` ends it."""
        self._is_closing = True
        self._lost("it is not wanted any more", None)

    async def close(self, grace_s: float = 5.0) -> None:
        """End it, whatever state it is in: no process is left when this returns."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close(grace_s, asks=self.is_up)
        for ended in list(self._ended):
            await ended.close()
        self.is_up = False

    def _submit(self, submit: Submit, *, is_bounded: bool) -> None:
        assert self._engine is not None
        self._engine.send(submit, is_bounded=is_bounded)

    # Messages of the process of now; those of earlier ones are not listened to.

    async def _listen(self, engine: EngineProcess) -> None:
        def dispatch(messages: list[Any]) -> None:
            for message in messages:
                if engine is self._engine:
                    self._take_message(message)

        def on_end(reason: str) -> None:
            if engine is self._engine:
                self._lost(reason, None)

        await engine.connect(dispatch, on_end)

    def _take_message(self, message: Message) -> None:
        if isinstance(message, Emission):
            self._take_step(message)
        elif isinstance(message, Output):
            self._settle(message)
        elif isinstance(message, Ready):
            self._ready(message.info)
        elif isinstance(message, Fatal):
            if self.info is not None:
                self._last_words = message.message  # its connection closes next
            else:
                self._fail(ConfigError(message.message) if message.is_config else EngineDead(message.message))
        else:
            self._owner.engine_said(self, message)

    # Up again.

    def _ready(self, info: EngineInfo) -> None:
        before, self.info = self.info, info
        self.is_up, self.is_between = True, False
        self.awaited.clear()
        if before is None:
            # As many blocks as now, whatever memory is free when the next one starts: what fits one fits the other.
            cache = replace(self._config.cache, num_blocks=info.num_blocks)
            self._config = replace(self._config, cache=cache)
        else:
            self._start_s = time.monotonic() - self._down_since
            if before.computes_with() != info.computes_with():
                self._interrupt("the engine that replaced it computes differently")
        if self.settings:
            self.send(Reconfigure(0, self.settings))  # its reply is not waited for
        if before is not None:
            num_begun = sum(bool(entry.tokens) for entry in self.entries.values())
            num_new = len(self.entries) - num_begun
            log.warning("engine process %s is up: %d answers go on, %d begin anew", self.pid, num_begun, num_new)
        self._owner.engine_up(self)
        self._resume()

    # Down.

    def _lost(self, reason: str, stall: Stall | None) -> None:
        """The process of now is over: requests wait from now on, and another one is started."""
        engine, self._engine = self._engine, None
        self.is_up = False
        if engine is None:
            return
        self._ended.add(engine)
        if self._is_closing or self.failure is not None:
            return
        self._down_since = time.monotonic()
        self._owner.engine_lost(self)
        self._spawn(self._recover(engine, reason, stall))

    async def _recover(self, engine: EngineProcess, reason: str, stall: Stall | None) -> None:
        if stall is not None:  # that is all there is to know, and requests need not wait until it is over
            self._hand_on(engine, 0, stall)
            await engine.ask_stacks()
        code = await engine.close(0.0 if stall is not None else _EXIT_S)
        self._ended.discard(engine)
        how = ending(code) if stall is None else str(stall)
        level = logging.INFO if self._is_asked else logging.ERROR
        log.log(level, "engine process %d ended (%s): %s", engine.pid, how, self._last_words or reason)
        if engine.stacks:
            log.error("stacks of engine process %d:\n%s", engine.pid, engine.stacks)
        if stall is None:
            self._hand_on(engine, code, None)
        words, self._last_words = self._last_words or f"{how}: {reason}", ""
        await self._start_another(words)

    def _hand_on(self, engine: EngineProcess, code: int, stall: Stall | None) -> None:
        self._account(engine, code, stall)
        self.is_between = True
        self._owner.engine_ended(self)

    async def _start_another(self, words: str) -> None:
        """Start an engine process, after a pause if the last ones did not last; give up if none does."""
        while (
            self._num_deaths < self._rules.max_deaths and self._num_blamed < _MOST_BLAMED
        ) or self._owner.keeps_engine(self):
            if self._num_deaths > 1:
                await asyncio.sleep(min(_LONGEST_S, self._rules.backoff_s * 2 ** min(self._num_deaths - 2, 10)))
            self.num_restarts += 1
            try:
                self._engine = EngineProcess.start(self._next_config(), self._how._replace(is_another=True))
            except OSError as error:  # no process, memory or descriptor to be had
                words = f"another one cannot be started: {error}"
                log.error("%s", words)
                self._num_deaths += 1
                continue
            await self._listen(self._engine)
            return
        times = f" {self._num_deaths} times without a step between" if self._num_deaths > 1 else ""
        self._fail(EngineDead(f"the engine process has ended{times}: {words}"))

    def _next_config(self) -> EngineConfig:
        """With the adapters that the last process had, and only as they were then."""
        if self.info is None:
            return self._config
        paths = {source.name: source.path for source in parse_adapters(self._config.model.adapter)} | self.adapter_paths
        had = [AdapterSource(name, paths[name], digest) for name, digest in self.info.adapters.items()]
        return replace(self._config, model=replace(self._config.model, adapter=tuple(map(str, had))))

    def _account(self, engine: EngineProcess, code: int, stall: Stall | None) -> None:
        """What this death means for the requests that the engine held, and for the next start."""
        held = [id for id in sorted(self.entries) if self.entries[id].is_sent]
        has_begun = engine.beat.steps > 0
        if has_begun:
            self._num_deaths = self._num_blamed = 0
        is_asked, self._is_asked = self._is_asked, False
        if not is_asked and (self.info is None or held or engine.beat.turns == 0):
            self._num_deaths += 1
        for id in held:
            entry = self.entries[id]
            entry.is_sent = False
            entry.num_barren += not is_asked
            if entry.aborting is not None:
                self._settle(Output(id, finish=entry.aborting))
        if not self._rules.resumes:
            self._interrupt("the engine process has ended")
        held = [id for id in held if id in self.entries]
        if held and not is_asked and self._is_crash(code, stall, held):
            blamed = self._suspects.crashed(held)
            if blamed is not None:
                self._num_blamed += 1
                log.error("request %d ended an engine process that held no other request: it fails", blamed)
                self._settle(Output(blamed, finish="error", error="this request ended the engine process"))
            if blamed is not None or self._suspects.is_halving:
                self._num_deaths = 0  # explained by a request, which is found soon
        self._num_killed = num_out_of_memory()

    def _is_crash(self, code: int, stall: Stall | None, held: Sequence[int]) -> bool:
        """False if the engine was stopped or killed from outside: no request is to blame then."""
        if stall is not None:
            return not stall.is_stopped
        if code != -signal.SIGKILL or num_out_of_memory() != self._num_killed:
            return True
        return any(self.entries[id].num_barren > _BARREN for id in held)

    def _fail(self, failure: EngineDead | ConfigError) -> None:
        if self.failure is not None or self._is_closing:
            return
        self.failure = failure
        engine, self._engine, self.is_up, self.is_between = self._engine, None, False, False
        if engine is not None:  # its requests may go on elsewhere: it is listened to no more
            self._ended.add(engine)
            self._spawn(self._reap(engine))
        self._owner.engine_failed(self, failure)

    async def _reap(self, engine: EngineProcess) -> None:
        await engine.close(_EXIT_S)
        self._ended.discard(engine)

    # In the background.

    async def _watch(self) -> None:
        """Look at the engine of now, again and again, and replace one that stands still."""
        watched: EngineProcess | None = None
        every_s = min(_LOOK_S, self._rules.stall_s / 4)
        last = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            passed_s, last = min(time.monotonic() - last, 2 * every_s), time.monotonic()
            engine = self._engine
            if engine is None:
                continue
            if engine is not watched:
                watched = engine
                watchdog = Watchdog(self._rules.stall_s, has_device=self._config.model.device != "cpu")
            stall = watchdog.observe(engine.beat, look_at(engine.pid), bool(self.entries), passed_s)
            if stall is not None:
                log.error("engine process %d: %s; it is replaced", engine.pid, stall)
                self._lost(str(stall), stall)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the engine's supervisor failed", exc_info=error)
            self._fail(EngineDead(f"the engine's supervisor failed: {error!r}"))
