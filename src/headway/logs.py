"""How log lines of a process look: plain text, or one JSON object per line with the fields that a record carries.

A terminal gets shorter ones: the reader knows the day, and seldom asks for the module. Lines are written by a thread,
so that a pipe without a reader, or a terminal that is held, does not stop the process; what it cannot take is counted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque

_TEXT = "%(asctime)s %(levelname)s {process} %(name)s: %(message)s"
MOST_LINES = 4096  # that wait to be written
_END_S = 1.0  # for those that wait when the process ends
_SHORT = "%(asctime)s %(levelname)s {process}: %(message)s"


def set_up(process: str, level: str, form: str) -> None:
    """Log to stderr as `form` (text or json) says; `process` names this one in every line."""
    handler = LineWriter(sys.stderr.fileno())
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    elif sys.stderr.isatty():
        handler.setFormatter(logging.Formatter(_SHORT.format(process=process), "%H:%M:%S"))
    else:
        handler.setFormatter(logging.Formatter(_TEXT.format(process=process)))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class LineWriter(logging.Handler):
    """Never waits for a reader. Writes to the descriptor itself: a stream would be locked when the process ends."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._num_left_out = 0
        self._is_writing = False
        self._news = threading.Condition()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._encoded(record)
            with self._news:
                if len(self._lines) >= MOST_LINES:
                    self._num_left_out += 1
                    return
                self._lines.append(line)
                self._news.notify_all()
        except Exception:  # as handlers do: a line that cannot be made harms nothing
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, for a second at most; at the end of the process it is called by `logging`."""
        with self._news:
            self._news.wait_for(lambda: not self._lines and not self._is_writing, _END_S)

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _write_all(self) -> None:
        while True:
            with self._news:
                self._is_writing = False
                self._news.notify_all()
                self._news.wait_for(lambda: bool(self._lines))
                self._is_writing = True
                line = self._lines.popleft()
                if self._num_left_out and not self._lines:
                    self._lines.append(self._encoded(_left_out(self._num_left_out)))
                    self._num_left_out = 0
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # closed
                continue


def _left_out(count: int) -> logging.LogRecord:
    text = "%d log lines were left out, since nothing read them"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None)


class JsonFormatter(logging.Formatter):
    """One object per line; a record's `fields` are keys of their own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
