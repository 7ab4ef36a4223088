"""The engine that does not end: processes come and go, every request goes on.

    start ─▶ UP ──death or stall──▶ reap, log, blame ─▶ back off ─▶ start another ─▶ UP: submit again what is open
                                        └─ the third death in a row without a committed step ─▶ give up

`SupervisedClient` is a `StreamClient` whose streams outlive the process behind them. What it submits again is in
`journal`, which requests are kept apart after a second crash in `suspects`, what is a stall in `watchdog`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.config import EngineConfig
from headway.engine.client import EngineInfo, Output, Settings, Stats, Submit
from headway.engine.journal import OpenRequest
from headway.engine.messages import Abort, Command, Fatal, Ready, Reconfigure
from headway.engine.process import CHILD, ChildCommand, EngineProcess, ending, num_out_of_memory
from headway.engine.streams import INTERRUPTED, OutputStream, StreamClient
from headway.engine.suspects import Suspects
from headway.engine.watchdog import Stall, Watchdog, look_at
from headway.errors import ConfigError, EngineDead, EngineRestarting
from headway.values.plan import Emission

log = logging.getLogger(__name__)

_RESTARTING = "the engine process is being replaced; try again in a few seconds"
_LOOK_S = 0.5  # between two looks of the watchdog, at most
_EXIT_S = 2.0  # for a process whose connection has closed to end by itself, with its own exit code
_PROOF = 2  # tokens after a resume that clear a suspect
_BARREN = 4  # engines killed from outside that gave a request no token before it is suspected all the same
_MOST_BLAMED = 5  # in a row, without a committed step: then the engine is to blame


@dataclass(frozen=True, slots=True)
class Supervision:
    """What is done about an engine that ends or stands still."""

    resumes: bool = True  # answers that have begun go on; else they end with an error
    max_deaths: int = 3  # in a row, without a committed step between them, before it gives up
    stall_s: float = 3.0  # see `watchdog`; 0: no watchdog
    backoff_s: float = 0.5  # before the second start in a row; twice as long before the next


class SupervisedClient(StreamClient):
    """Each open stream has an entry in the journal. `dead` is set once it has given up; until then it recovers."""

    def __init__(
        self, config: EngineConfig, how: ChildCommand, rules: Supervision, *, max_buffer_bytes: int = 1024 * 1024
    ) -> None:
        super().__init__(max_buffer_bytes=max_buffer_bytes)
        self.num_restarts = 0
        self._config = config
        self._how = how
        self._rules = rules
        self._entries: dict[int, OpenRequest] = {}
        self._suspects = Suspects()
        self._settings: Settings = {}  # what was changed while it ran: the next engine gets it too
        self._engine: EngineProcess | None = None
        self._is_up = False
        self._is_closing = False
        self._last_words = ""
        self._num_deaths = 0  # in a row, without a committed step
        self._num_blamed = 0  # likewise
        self._num_killed = num_out_of_memory()
        self._start_s = 2.0  # how long the last recovery took
        self._down_since = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: set[EngineProcess] = set()  # not reaped yet

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] = CHILD,
        log_level: str = "info",
        log_format: str = "text",
        rules: Supervision | None = None,
        max_buffer_bytes: int = 1024 * 1024,
    ) -> SupervisedClient:
        """Start the first engine process and return at once; needs no event loop."""
        how = ChildCommand(command, log_level, log_format)
        client = cls(config, how, rules or Supervision(), max_buffer_bytes=max_buffer_bytes)
        client._engine = EngineProcess.start(config, how)
        return client

    @property
    def pid(self) -> int | None:
        """Of the engine process; None between two of them."""
        return None if self._engine is None else self._engine.pid

    @property
    def recovering(self) -> float | None:
        """Seconds until requests are probably taken again; None while they are, or before the first engine was up."""
        if self._info is None or self._failure is not None or (self._is_up and not self._suspects.is_halving):
            return None
        return max(0.0, self._start_s - (time.monotonic() - self._down_since))

    async def connect(self) -> None:
        """Begin to listen to the engine and to watch it, in the running event loop."""
        assert self._engine is not None
        await self._listen(self._engine)
        if self._rules.stall_s > 0:
            self._spawn(self._watch())

    def submit(self, submit: Submit) -> OutputStream:
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        assert submit.id not in self._streams, f"request id {submit.id} is in use"
        entry = OpenRequest(submit, time.monotonic())
        if self._is_up and self._suspects.admits(submit.id):
            assert self._engine is not None
            self._engine.send(submit)
            entry.is_sent = True
        stream = self._streams[submit.id] = OutputStream(submit.id, self._give_up)
        self._entries[submit.id] = entry
        return stream

    def abort(self, id: int, reason: str = "abort") -> None:
        entry = self._entries.get(id)
        if entry is None:
            return
        if entry.is_sent and self._is_up:
            entry.aborting = reason
            self._send(Abort(id, reason))
        else:
            self._deliver(Output(id, finish=reason))

    def end_all(self, reason: str = "abort") -> None:
        for id in list(self._streams):
            self.abort(id, reason)
            self._deliver(Output(id, finish=reason))

    async def stats(self) -> Stats:
        return replace(await super().stats(), restarts=self.num_restarts)

    async def reconfigure(self, changes: Settings) -> Settings:
        settings = await super().reconfigure(changes)
        self._settings |= changes
        return settings

    async def close(self, grace_s: float = 5.0) -> None:
        """End the engine, whatever state it is in: no process is left when this returns."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close(grace_s, asks=self._is_up)
        for ended in list(self._ended):
            await ended.close()
        self._is_up = False
        self._fail(EngineDead("the engine was closed"))

    def _send(self, command: Command) -> None:
        if self._engine is None or not self._is_up:
            raise EngineRestarting(_RESTARTING)
        self._engine.send(command)

    # Messages of the engine of now; those of earlier ones are not listened to.

    async def _listen(self, engine: EngineProcess) -> None:
        def dispatch(messages: list[Any]) -> None:
            if engine is self._engine:
                self._take(messages)

        def on_end(reason: str) -> None:
            if engine is self._engine:
                self._lost(reason, None)

        await engine.connect(dispatch, on_end)

    def _take(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Ready):
                self._ready(message.info)
            elif isinstance(message, Fatal) and self._info is not None:
                self._last_words = message.message  # its connection closes next
            else:
                self._dispatch((message,))

    def _deliver_step(self, step: Emission[Output]) -> None:
        entries = self._entries
        for id, token in zip(step.ids, step.tokens, strict=True):
            entry = entries.get(id)
            if entry is not None:
                if not entry.tokens:
                    entry.first = time.monotonic()
                entry.tokens.append(token)
                if entry.num_resumes:
                    self._note_progress(entry)
        super()._deliver_step(step)

    def _note_progress(self, entry: OpenRequest) -> None:
        entry.num_barren = 0
        if len(entry.tokens) - entry.num_before == _PROOF and self._suspects.cleared(entry.submit.id):
            self._resume()

    def _deliver(self, output: Output) -> None:
        entry = self._entries.pop(output.id, None)
        super()._deliver(output if entry is None else entry.settle(output, time.monotonic()))
        if self._suspects.ended(output.id):
            self._resume()

    def _give_up(self, id: int) -> None:
        super()._give_up(id)
        self._entries.pop(id, None)
        if self._suspects.ended(id):
            self._resume()

    def _fail(self, failure: EngineDead | ConfigError) -> None:
        super()._fail(failure)
        self._entries.clear()

    # Up again.

    def _ready(self, info: EngineInfo) -> None:
        before, self._info = self._info, info
        self.published = None  # what the one before said of waiting times is not true of this one
        self._is_up = True
        if before is None:
            # As many blocks as now, whatever memory is free when the next one starts: what fits one fits the other.
            cache = replace(self._config.cache, num_blocks=info.num_blocks)
            self._config = replace(self._config, cache=cache)
            self._news.set()
        else:
            self._start_s = time.monotonic() - self._down_since
        if before is not None and before.computes_with() != info.computes_with():
            self._interrupt("the engine that replaced it computes differently")
        if self._settings:
            self._send(Reconfigure(next(self._tickets), self._settings))
        num_begun = sum(bool(entry.tokens) for entry in self._entries.values())
        num_new = len(self._entries) - num_begun
        if before is not None:
            log.warning("engine process %s is up: %d answers go on, %d begin anew", self.pid, num_begun, num_new)
        self._resume()

    def _resume(self) -> None:
        """Give the engine every open request that it may have and has not."""
        if not self._is_up or self._engine is None or self._is_closing:
            return
        now, eos_ids = time.monotonic(), self.info.eos_ids
        for id in sorted(self._entries):
            entry = self._entries.get(id)
            if entry is None or entry.is_sent or not self._suspects.admits(id):
                continue
            finish = entry.finish(eos_ids) if entry.tokens else None
            if finish is not None:
                self._deliver(Output(id, finish=finish))
                continue
            self._engine.send(entry.resubmission(now), is_bounded=False)
            entry.is_sent = True

    # Down.

    def _lost(self, reason: str, stall: Stall | None) -> None:
        """The engine of now is over: requests wait from now on, and another one is started."""
        engine, self._engine = self._engine, None
        self._is_up = False
        if engine is None:
            return
        self._ended.add(engine)
        if self._is_closing or self._failure is not None:
            return
        self._down_since = time.monotonic()
        self.published = None  # waiting times of an engine that is gone
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineRestarting(_RESTARTING))
        self._spawn(self._recover(engine, reason, stall))

    async def _recover(self, engine: EngineProcess, reason: str, stall: Stall | None) -> None:
        if stall is not None:
            await engine.ask_stacks()
        code = await engine.close(0.0 if stall is not None else _EXIT_S)
        self._ended.discard(engine)
        how = ending(code) if stall is None else str(stall)
        log.error("engine process %d ended (%s): %s", engine.pid, how, self._last_words or reason)
        if engine.stacks:
            log.error("stacks of engine process %d:\n%s", engine.pid, engine.stacks)
        self._account(engine, code, stall)
        words, self._last_words = self._last_words or f"{how}: {reason}", ""
        await self._start_another(words)

    async def _start_another(self, words: str) -> None:
        """Start an engine process, after a pause if the last ones did not last; give up if none does."""
        while self._num_deaths < self._rules.max_deaths and self._num_blamed < _MOST_BLAMED:
            if self._num_deaths > 1:
                await asyncio.sleep(self._rules.backoff_s * 2 ** (self._num_deaths - 2))
            self.num_restarts += 1
            try:
                self._engine = EngineProcess.start(self._config, self._how._replace(is_another=True))
            except OSError as error:  # no process, memory or descriptor to be had
                words = f"another one cannot be started: {error}"
                log.error("%s", words)
                self._num_deaths += 1
                continue
            await self._listen(self._engine)
            return
        times = f" {self._num_deaths} times without a step between" if self._num_deaths > 1 else ""
        self._fail(EngineDead(f"the engine process has ended{times}: {words}"))

    def _account(self, engine: EngineProcess, code: int, stall: Stall | None) -> None:
        """What this death means for the requests that the engine held, and for the next start."""
        held = [id for id in sorted(self._entries) if self._entries[id].is_sent]
        has_begun = engine.beat.steps > 0
        if has_begun:
            self._num_deaths = self._num_blamed = 0
        if self._info is None or held or engine.beat.turns == 0:
            self._num_deaths += 1
        for id in held:
            entry = self._entries[id]
            entry.is_sent = False
            entry.num_barren += 1
            if entry.aborting is not None:
                self._deliver(Output(id, finish=entry.aborting))
        if not self._rules.resumes:
            self._interrupt("the engine process has ended")
        held = [id for id in held if id in self._entries]
        if held and self._is_crash(code, stall, held):
            blamed = self._suspects.crashed(held)
            if blamed is not None:
                self._num_blamed += 1
                log.error("request %d ended an engine process that held no other request: it fails", blamed)
                self._deliver(Output(blamed, finish="error", error="this request ended the engine process"))
            if blamed is not None or self._suspects.is_halving:
                self._num_deaths = 0  # explained by a request, which is found soon
        self._num_killed = num_out_of_memory()

    def _is_crash(self, code: int, stall: Stall | None, held: Sequence[int]) -> bool:
        """False if the engine was stopped or killed from outside: no request is to blame then."""
        if stall is not None:
            return not stall.is_stopped
        if code != -signal.SIGKILL or num_out_of_memory() != self._num_killed:
            return True
        return any(self._entries[id].num_barren > _BARREN for id in held)

    def _interrupt(self, why: str) -> None:
        """End the answers that have begun; requests without a token are retried all the same."""
        for id in [id for id, entry in self._entries.items() if entry.tokens]:
            self._deliver(Output(id, finish="error", error=f"this answer was cut off: {why}", code=INTERRUPTED))

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
            stall = watchdog.observe(engine.beat, look_at(engine.pid), bool(self._entries), passed_s)
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
