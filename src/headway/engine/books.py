"""What the engine remembers about what happened: counters for everybody, times per request, a log for whoever asks.

It is a sink of the core's events and nothing else feeds it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from headway.core.events import Admitted, Event, Finished, FirstToken, Preempted, Queued, Stepped
from headway.engine.client import Timing
from headway.engine.clock import Clock


class StepLog:
    """One JSON line per event, in the order in which things happened."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def emit(self, event: Event) -> None:
        self._file.write(json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n")
        if isinstance(event, Stepped | Finished):
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Books:
    """Counters only grow; times of a request are kept until it is closed."""

    def __init__(self, clock: Clock, log: StepLog | None = None) -> None:
        self._clock = clock
        self._log = log
        self._times: dict[int, list[float | None]] = {}  # id -> [queued, admitted, first token]
        self.steps = 0
        self.preemptions = 0
        self.computed = 0
        self.generated = 0
        self.cached = 0
        self.copies = 0
        self.finished: dict[str, int] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.steps += 1
            self.computed += event.num_computed
            self.generated += event.num_generated
            self.copies += event.num_copies
        elif isinstance(event, Finished):
            self.finished[event.reason] = self.finished.get(event.reason, 0) + 1
        elif isinstance(event, Preempted):
            self.preemptions += 1
        else:
            self._note_time(event)
        if self._log is not None:
            self._log.emit(event)

    def _note_time(self, event: Queued | Admitted | FirstToken) -> None:
        now = self._clock.now()
        if isinstance(event, Queued):
            self._times[event.id] = [now, None, None]
            return
        if isinstance(event, FirstToken):
            self._times[event.id][2] = now
        elif not event.is_resumed:
            self._times[event.id][1] = now
            self.cached += event.num_cached

    def close_request(self, id: int) -> Timing:
        """How long a request took, by part; forgets it."""
        now = self._clock.now()
        queued, admitted, first = (now if time is None else time for time in self._times.pop(id))
        return Timing(admitted - queued, first - queued, now - queued)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
