"""The request log: prompts and the lengths of their answers, one JSON object per line.

    {"at": 12.25, "tokens": [1, 4093, 198], "tenant": "ann", "route": "chat", "max_tokens": 256, "temperature": 0.7,
     "has_stop": false, "ignore_eos": false, "num_output": 83, "finish": "stop"}

`tokens` is the prompt, `at` its arrival in seconds from any origin, `finish` is stop, length or abort; the last two
were cut, so their answers would have been longer. `tokens`, `max_tokens`, `num_output` and `finish` are required. The
text is not kept, but the model's tokenizer turns the tokens back into the prompts: protect the file as you would
protect them.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, RequestError
from headway.rank.features import extract
from headway.rank.train import Sample
from headway.values.params import SamplingParams

log = logging.getLogger(__name__)

FINISHES = ("stop", "length", "abort")
_BACKLOG = 4096  # entries that may wait to be written
_NEEDED = ("tokens", "max_tokens", "num_output", "finish")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    tokens: list[int]
    max_tokens: int
    num_output: int
    finish: str
    at: float = 0.0
    tenant: str = ""
    route: str = ""
    temperature: float = 1.0
    has_stop: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("tokens", _are_ints(self.tokens), "a list of token ids"),
            ("num_output", _is_int(self.num_output) and self.num_output >= 0, "0 or more"),
            ("finish", self.finish in FINISHES, ", ".join(FINISHES)),
            ("at", isinstance(self.at, int | float) and not isinstance(self.at, bool), "seconds"),
            ("tenant", isinstance(self.tenant, str), "a text"),
            ("route", isinstance(self.route, str), "a text"),
            ("has_stop", isinstance(self.has_stop, bool), "true or false"),
        ):
            if not ok:
                raise ValueError(f"{name} is {str(getattr(self, name))[:80]!r}; allowed: {allowed}")
        self.params  # noqa: B018  it checks the rest

    @property
    def params(self) -> SamplingParams:
        """As much of them as the ranker looks at."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop="\n" if self.has_stop else (),
            ignore_eos=self.ignore_eos,
        )

    @property
    def is_cut(self) -> bool:
        return self.finish != "stop"

    def sample(self) -> Sample:
        """What there is to learn from it."""
        return Sample(extract(self.tokens, self.tenant, self.route, self.params), self.num_output, self.is_cut)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(values: object) -> bool:
    return isinstance(values, list) and all(_is_int(value) for value in values)


class RequestLog:
    """Writes and flushes each entry at once: entries survive a crash of the process."""

    def __init__(self, path: Path) -> None:
        try:
            # Prompts are private: readable by the owner only.
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(file, "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the request log {path}: {error.strerror}; choose another file") from error

    def write(self, entry: Entry) -> None:
        self._file.write(json.dumps(asdict(entry)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Recorder:
    """A request log with a thread of its own: `record` never waits and never fails.

    What the disk cannot keep up with is dropped and counted; a disk that fails ends the log, not the requests.
    """

    def __init__(self, path: Path, backlog: int = _BACKLOG) -> None:
        self._path = path
        self._log = RequestLog(path)
        self._queue: queue.Queue[Callable[[], Entry] | None] = queue.Queue(backlog)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._work, name="headway-rank-log", daemon=True)
        self._thread.start()

    def record(self, make: Callable[[], Entry]) -> None:
        """Have an entry made and written, on the other thread."""
        try:
            self._queue.put_nowait(make)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what is left; idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            if self.num_dropped:
                log.warning("%d requests are missing in %s: it could not keep up", self.num_dropped, self._path)

    def _work(self) -> None:
        is_broken = False
        while (make := self._queue.get()) is not None:
            try:
                if not is_broken:
                    self._log.write(make())
            except Exception:
                log.exception("the request log %s has failed and ends here; requests go on", self._path)
                is_broken = True
        try:
            self._log.close()
        except OSError as error:
            log.warning("the request log %s was not closed cleanly: %s", self._path, error)


def read_log(path: Path) -> list[Entry]:
    """All entries in the order of their arrival; ConfigError names the first line that is none."""
    try:
        with path.open(encoding="utf-8") as file:
            entries = list(_entries(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the request log {path}: {error}") from error
    return sorted(entries, key=lambda entry: entry.at)


def _entries(lines: Iterator[str], path: Path) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _entry(json.loads(line))
        except (ValueError, RequestError) as error:
            raise ConfigError(f"line {number} of the request log {path}: {error}") from error


def _entry(value: Any) -> Entry:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:80]!r} is no object; one looks like {{{', '.join(_NEEDED)}, ...}}")
    missing = [name for name in _NEEDED if name not in value]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing; needed: {', '.join(_NEEDED)}")
    unknown = sorted(value.keys() - set(Entry.__dataclass_fields__))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; allowed: {', '.join(Entry.__dataclass_fields__)}")
    return Entry(**value)
