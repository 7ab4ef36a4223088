"""Child processes for work on what came from outside: one question at a time, with bounds on time and memory.

A child is a script that reads one JSON line and answers with one, `cpu_s` among it: the CPU time of the process so
far, which tells a busy child from a stopped one. `LimitedChild` is one of them, `ChildPool` a few that threads share.
What is asked, and what an answer means, is not known here; the child bounds its own memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
READ_BYTES = 1 << 16


class ChildPool:
    """A few children at most, each with one question at a time and none that was given up on. Threads may share it."""

    def __init__(self, start: Callable[[], LimitedChild], max_children: int) -> None:
        """`start` gives a child that is ready for questions."""
        self._start = start
        self._max_children = max_children
        self.idle: list[LimitedChild] = []
        self._lent: set[LimitedChild] = set()
        self._num_starting = 0
        self._change = threading.Condition()

    def close(self) -> None:
        """End the children; a later question starts another. One that waits for its answer fails."""
        with self._change:
            for child in self._lent:
                child.end()
            idle, self.idle = self.idle, []
        for child in idle:
            child.kill()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[LimitedChild]:
        """A child for one question or a few; blocks while all are at work."""
        child = self._take()
        try:
            yield child
        finally:
            with self._change:
                self._lent.discard(child)
                can_go_on = child.is_alive and not child.is_ending
                if can_go_on:
                    self.idle.append(child)
                self._change.notify()
            if not can_go_on:
                child.kill()

    def _take(self) -> LimitedChild:
        with self._change:
            while not self.idle and len(self._lent) + self._num_starting >= self._max_children:
                self._change.wait()
            while self.idle:
                child = self.idle.pop()
                if child.is_alive:
                    self._lent.add(child)
                    return child
                child.kill()  # it ended by itself: what is left of it
            self._num_starting += 1
        started: LimitedChild | None = None
        try:
            started = self._start()
            return started
        finally:
            with self._change:
                self._num_starting -= 1
                if started is not None:
                    self._lent.add(started)
                self._change.notify()


class LimitedChild:
    """One process, one question at a time; after any exception it must be killed, for it may still be answering."""

    def __init__(self, script: Path) -> None:
        # -P: the folder of the script is no place to import from. By path: `-m` would import headway itself.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)
        self._cpu_s = 0.0  # as of its last answer
        self.is_ending = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_signal(self) -> int | None:
        """The signal that ended it, once it has ended."""
        code = self._process.returncode
        return -code if code is not None and code < 0 else None

    def ask(self, line: bytes, timeout_s: float, most_bytes: int) -> dict[str, object]:
        """Send a line and wait for one; TimeoutError, EOFError, OSError or ValueError if that does not come."""
        deadline = time.monotonic() + timeout_s
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            selector.register(self._in, selectors.EVENT_WRITE)
            rest = memoryview(line)
            while not answer.endswith(b"\n"):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise TimeoutError
                for key, _ in events:
                    if key.fileobj is self._out:
                        answer += self._read()
                    else:
                        rest = rest[os.write(self._in.fileno(), rest[:READ_BYTES]) :]
                        if not rest:
                            selector.unregister(self._in)
                if len(answer) > most_bytes:
                    raise ValueError("the answer is longer than any that keeps the limits")
        found = json.loads(answer)
        if not isinstance(found, dict):
            raise ValueError("the answer is no object")
        cpu_s = found.get("cpu_s")
        self._cpu_s = cpu_s if isinstance(cpu_s, float) else self._cpu_s
        return found

    def end(self) -> None:
        """Have it end while another thread waits for its answer; that one must then `kill` it."""
        self.is_ending = True
        self._process.kill()

    def kill(self) -> float:
        """End it for good; the CPU seconds since its last answer."""
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()
        if not self.is_alive:
            return 0.0
        self._process.kill()
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime - self._cpu_s

    def _read(self) -> bytes:
        chunk = os.read(self._out.fileno(), READ_BYTES)
        if not chunk:
            raise EOFError
        return chunk
