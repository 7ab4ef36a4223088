"""Counters of the engine, timings per request, and an optional log of all events.

It is a sink of the core's events and nothing else feeds it.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from headway.engine.client import RequestTiming
from headway.engine.clock import Clock
from headway.engine.decisions import DecisionJournal
from headway.errors import ConfigError
from headway.values.events import Admitted, Event, Finished, FirstToken, Preempted, Queued, Stepped

log = logging.getLogger(__name__)


class StepLog:
    """One JSON line per event, in the order in which things happened. A file that fails ends the log and no more."""

    def __init__(self, path: Path, *, appends: bool = False) -> None:
        try:
            self._file: TextIO | None = path.open("a" if appends else "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"step_log is {str(path)!r}, which cannot be written: {error.strerror}") from error

    def emit(self, event: Event) -> None:
        if self._file is None:
            return
        fields = asdict(event)
        if isinstance(event, Admitted | Finished):
            fields["waited"] = {reason.name.lower(): waited._asdict() for reason, waited in event.waited}
        try:
            self._file.write(json.dumps({"event": type(event).__name__, **fields}) + "\n")
            if isinstance(event, Stepped | Finished):
                self._file.flush()
        except OSError as error:
            log.error("the step log ends here, the engine goes on: %s: %s", self._file.name, error.strerror)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what a full disk did not take
                file.close()


class _OpenTiming:
    """Time of a request so far, by part; it is in exactly one part at a time."""

    __slots__ = ("first", "part", "predicted", "queued", "since", "spent")

    def __init__(self, now: float) -> None:
        self.queued = self.since = now
        self.first: float | None = None
        self.predicted: float | None = None  # seconds from `queued` to `first`
        self.part = "queue"
        self.spent = {"queue": 0.0, "prefill": 0.0, "decode": 0.0, "preempted": 0.0}

    def enter(self, part: str, now: float) -> None:
        self.spent[self.part] += now - self.since
        self.part, self.since = part, now

    @property
    def running_part(self) -> str:
        return "prefill" if self.first is None else "decode"


class EngineMetrics:
    """Counters only grow; times of a request are kept until it is closed."""

    def __init__(self, clock: Clock, log: StepLog | None = None, journal: DecisionJournal | None = None) -> None:
        self._clock = clock
        self._log = log
        self.journal = journal  # None: nothing is explained
        self._timings: dict[int, _OpenTiming] = {}
        self.steps = 0
        self.preemptions = 0
        self.swaps = 0
        self.preemptions_protected = 0
        self.computed = 0
        self.generated = 0
        self.cached = 0
        self.recomputed = 0
        self.copies = 0
        self.finished: dict[str, int] = {}
        self.waited: dict[str, float] = {}  # seconds of ended requests, by wait reason

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.steps += 1
            self.computed += event.num_computed
            self.generated += event.num_generated
            self.copies += event.num_copies
        elif isinstance(event, Finished):
            self.finished[event.reason] = self.finished.get(event.reason, 0) + 1
            self.recomputed += event.num_recomputed
            for reason, waited in event.waited:
                name = reason.name.lower()
                self.waited[name] = self.waited.get(name, 0.0) + waited.seconds
        else:
            self._note_time(event)
        if self.journal is not None:
            self.journal.emit(event)
        if self._log is not None:
            self._log.emit(event)

    def _note_time(self, event: Queued | Admitted | FirstToken | Preempted) -> None:
        now = event.now
        if isinstance(event, Queued):
            self._timings[event.id] = _OpenTiming(now)
            return
        timing = self._timings[event.id]
        if isinstance(event, FirstToken):
            timing.first = now
            timing.enter("decode", now)
        elif isinstance(event, Preempted):
            self.preemptions += 1
            self.swaps += event.is_swapped
            self.preemptions_protected += event.is_protected
            timing.enter("preempted", now)
        else:
            timing.enter(timing.running_part, now)
            if not event.is_resumed:
                self.cached += event.num_cached

    def note_prediction(self, id: int, seconds: float) -> None:
        """Keep the TTFT that was predicted at arrival, to report it at the end."""
        self._timings[id].predicted = seconds
        if self.journal is not None:
            self.journal.predicted(id, seconds)

    def note_resumed(self, id: int, *, has_begun: bool) -> None:
        """Another engine had it. If that gave its first tokens, whatever this one does for it in a slot is decoding."""
        if has_begun:
            self._timings[id].first = self._timings[id].queued
        if self.journal is not None:
            self.journal.resumed(id, has_begun=has_begun)

    def count_rejected(self) -> None:
        """Count a request that SLO admission rejected."""
        self.finished["shed"] = self.finished.get("shed", 0) + 1

    def close_request(self, id: int) -> RequestTiming:
        """How long a request took, by part, until now, when its end is reported; forgets it.

        By the clock, not by `Finished`: in a static batch a request ends before its end is reported.
        """
        now = self._clock.now()
        timing = self._timings.pop(id)
        timing.enter(timing.part, now)
        spent = timing.spent
        return RequestTiming(
            queued_s=spent["queue"],
            first_token_s=(now if timing.first is None else timing.first) - timing.queued,
            total_s=now - timing.queued,
            prefill_s=spent["prefill"],
            decode_s=spent["decode"],
            preempted_s=spent["preempted"],
            predicted_s=timing.predicted,
        )

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
