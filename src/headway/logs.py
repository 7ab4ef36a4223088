"""How log lines of a process look: plain text, or one JSON object per line with the fields that a record carries.

A terminal gets shorter ones: the reader knows the day, and seldom asks for the module.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_TEXT = "%(asctime)s %(levelname)s {process} %(name)s: %(message)s"
_SHORT = "%(asctime)s %(levelname)s {process}: %(message)s"


def set_up(process: str, level: str, form: str) -> None:
    """Log to stderr as `form` (text or json) says; `process` names this one in every line."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    elif sys.stderr.isatty():
        handler.setFormatter(logging.Formatter(_SHORT.format(process=process), "%H:%M:%S"))
    else:
        handler.setFormatter(logging.Formatter(_TEXT.format(process=process)))
    logging.basicConfig(level=level.upper(), handlers=[handler])


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
