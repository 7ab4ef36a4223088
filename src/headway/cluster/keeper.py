"""Keeps one engine that joins fronts: starts its process, starts it again when it ends, and sees whether it goes on.

    start ─▶ loading ─▶ up ──ends, or stands still──▶ pause ─▶ start
                         │ `end`, or it is not wanted any more, or every front refused it, or it did not come up
                         │ three times in a row
                         └──────────────▶ over: `require_health` says why

The engine ends with its keeper, whatever way that ends: its socket closes, and on Linux the system ends it with the
thread that started it. This file knows nothing of what the keeper itself runs in.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from headway.cluster.join import REFUSED
from headway.cluster.spawn import JoiningProcess
from headway.engine.process import ending
from headway.engine.pulse import PulseReader
from headway.engine.watchdog import Watchdog, look_at
from headway.errors import EngineDead

log = logging.getLogger(__name__)

StartEngine = Callable[[int, bool], JoiningProcess]
"""Starts a process that shows what it does at this descriptor; `is_another`: after one that ended."""
_FIRST_S, _LONGEST_S = 0.2, 30.0  # before another process is started; twice as long after each that did not last
_LASTING_S = 60.0
_MOST_FAILURES = 3  # to come up at all, in a row
_LOOK_S = 0.1  # between two looks at a process that starts, or at whether it is to end


class EngineKeeper:
    """At most one engine process at a time; none once `end` has returned."""

    def __init__(
        self,
        start: StartEngine,
        *,
        stall_s: float = 3.0,
        has_device: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._start = start
        self._is_wanted = is_wanted
        self._stall_s, self._has_device = stall_s, has_device
        self._told = threading.Event()  # to end
        self._up = threading.Event()  # for the first time, or it never will be
        self._child: JoiningProcess | None = None
        self._failure: str | None = None
        self.num_restarts = 0
        self._thread = threading.Thread(target=self._run, name="headway-keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None between two."""
        child = self._child
        return None if child is None else child.pid

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until an engine is built and dials; False if time is over. EngineDead if none comes up."""
        is_over = self._up.wait(timeout_s)
        self.require_health()
        return is_over

    def require_health(self) -> None:
        """EngineDead, with the reason, if this keeper has given up."""
        if self._failure is not None:
            raise EngineDead(self._failure)

    def end(self, grace_s: float = 5.0) -> None:
        """Have the engine tell its fronts and end; returns when it has."""
        self._told.set()
        if self._thread is not threading.current_thread():
            self._thread.join(grace_s + 2 * _LOOK_S)
        child = self._child
        if child is not None:  # the thread is stuck: nothing that it does may keep an engine
            child.process.kill()

    def _run(self) -> None:
        """The thread: the system ends what it started when it ends."""
        pause_s, num_failures, is_another = _FIRST_S, 0, False
        try:
            while not self._told.is_set() and self._is_wanted():
                began = time.monotonic()
                code, was_up = self._keep_one(is_another)
                if self._told.is_set() or not self._is_wanted():
                    break
                if code in (2, REFUSED):
                    self._give_up(f"the engine cannot be of use here ({ending(code)}); its log says why")
                    return
                num_failures = 0 if was_up else num_failures + 1
                if num_failures >= _MOST_FAILURES:
                    self._give_up(f"no engine came up in {num_failures} attempts ({ending(code)}); its log says why")
                    return
                pause_s = _FIRST_S if time.monotonic() - began > _LASTING_S else pause_s
                log.error("the engine ended (%s); another one starts in %g s", ending(code), pause_s)
                self.num_restarts += 1
                self._told.wait(pause_s)
                pause_s, is_another = min(_LONGEST_S, 2 * pause_s), True
            self._give_up("the engine was ended")
        except Exception as error:
            log.exception("the keeper of an engine failed")
            self._give_up(f"the engine cannot be started: {error}")

    @staticmethod
    def parent_is_there() -> Callable[[], bool]:
        """For `is_wanted`: False once the process that started this one has ended, reaped or not."""
        parent = os.getppid()
        return lambda: os.getppid() == parent  # the system gives a process another parent at once

    def _give_up(self, why: str) -> None:
        self._failure = why
        self._up.set()

    def _keep_one(self, is_another: bool) -> tuple[int, bool]:
        """One process from its start to its end: its exit code, and whether it was up."""
        pulse = PulseReader()
        try:
            child = self._child = self._start(pulse.fd, is_another)
            try:
                was_up = self._wait_up(child)
                if was_up:
                    self._up.set()
                    self._watch(child, pulse)
                return child.end(), was_up
            finally:
                if child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
                self._child = None
        finally:
            pulse.close()

    def _wait_up(self, child: JoiningProcess) -> bool:
        with suppress(EngineDead):  # its exit code says more
            while not self._told.is_set() and self._is_wanted():
                if child.wait_ready(_LOOK_S):
                    return True
        return False

    def _watch(self, child: JoiningProcess, pulse: PulseReader) -> None:
        """Returns when the process has ended or stands still, or this keeper is to end."""
        watchdog = Watchdog(self._stall_s, has_device=self._has_device)
        last = time.monotonic()
        while child.process.poll() is None and self._is_wanted() and not self._told.wait(_LOOK_S):
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * _LOOK_S), now
            stall = watchdog.observe(pulse.read(), look_at(child.pid), True, passed_s)
            if stall is not None:
                log.error("engine process %d: %s; it is ended", child.pid, stall)
                child.process.kill()
                child.process.wait()
