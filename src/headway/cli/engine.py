"""`headway engine`: an engine that joins fronts, and what starts it again if it crashes. Owns flags alone."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Annotated

from cyclopts import Group, Parameter

from headway import logs
from headway.cli.args import Common, CommonFlags, EngineFlags, EngineOptions
from headway.cli.choice import describe
from headway.cluster.join import REFUSED, JoinConfig
from headway.cluster.spawn import JoiningProcess, start_joining
from headway.config import ROLES, ServerConfig
from headway.engine.process import ending
from headway.errors import ConfigError, EngineDead

EXAMPLES = """Examples:
  headway engine --join 127.0.0.1:7500
  headway engine ./Llama-3.2-1B --join front-a:7500,front-b:7500 --key-file key --tls-ca ca.pem --name gpu-3
  headway engine --join 127.0.0.1:7500 --role prefill
  headway engine --join front:7500 --key-file key --role decode --kv-listen 10.0.0.7:7600"""

JoinFlags = Annotated[JoinConfig, Parameter(name="*", group=Group("Joining", sort_key=1))]
_FIRST_S, _LONGEST_S = 0.5, 30.0  # before another process is started; twice as long after each that did not last
_LASTING_S = 60.0
_MOST_FAILURES = 3  # to come up at all, in a row


def engine(
    model: str | None = None,
    /,
    *,
    joining: JoinFlags,
    engine: EngineFlags = EngineOptions(),
    log_level: str = "info",
    log_format: str = "text",
    common: CommonFlags = Common(),
) -> int:
    """Run an engine that joins one front or several and computes for them.

    It dials each front again when that goes away, and keeps the model meanwhile. If its process crashes another one is
    started. It ends with exit code 1 if every front refuses it.

    Parameters
    ----------
    model
        The model; the same as --model. It must be the model of the front.
    log_level
        debug, info, warning or error.
    log_format
        text, or json with one object per line.
    """
    ServerConfig(log_level=log_level, log_format=log_format)  # says what is allowed
    config = engine.config(model)
    if config.scheduler.role not in ROLES:
        raise ConfigError(f"role is {config.scheduler.role!r}; one engine has one of {', '.join(ROLES)}")
    if common.print_config:
        print(describe(config))
        return 0
    logs.set_up("keeper", log_level, log_format)

    def start(is_another: bool) -> JoiningProcess:
        return start_joining(config, joining, log_level=log_level, log_format=log_format, is_another=is_another)

    return keep(start)


def keep(start: Callable[[bool], JoiningProcess]) -> int:
    """Have an engine process run until it ends as planned or cannot be brought up; the exit code."""
    told = threading.Event()
    child: JoiningProcess | None = None

    def end(number: int, frame: FrameType | None) -> None:
        told.set()
        if child is not None:
            child.process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    pause_s, num_failures, is_another = _FIRST_S, 0, False
    while not told.is_set():
        began, is_up = time.monotonic(), False
        child = start(is_another)
        with suppress(EngineDead):  # its exit code follows
            is_up = child.wait_ready()
        code = child.process.wait()
        child.sock.close()
        if code == REFUSED:
            return 1
        if told.is_set() or code in (0, 2):
            return code if code in (0, 2) else 0
        num_failures = 0 if is_up else num_failures + 1
        if num_failures >= _MOST_FAILURES:
            print(f"headway: no engine came up in {num_failures} attempts ({ending(code)})", file=sys.stderr)
            return 1
        pause_s = _FIRST_S if time.monotonic() - began > _LASTING_S else pause_s
        print(f"headway: the engine ended ({ending(code)}); another one starts in {pause_s:g} s", file=sys.stderr)
        told.wait(pause_s)
        pause_s, is_another = min(_LONGEST_S, 2 * pause_s), True
    return 0
