"""Processes below another one, as /proc lists them; one that ends meanwhile is left out, never an error."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                found += map(int, (task / "children").read_text().split())
    return found


def command_of(pid: int) -> str:
    """Its command line; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@contextmanager
def all_end(pids: list[int], *, within_s: float = 5.0) -> Iterator[None]:
    """Every one of these processes has ended that long after the body."""
    watches = []
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended already
            watches.append(os.pidfd_open(pid))
    try:
        yield
        for watch in watches:
            assert select.select([watch], [], [], within_s)[0], "a process was left behind"
    finally:
        for watch in watches:
            os.close(watch)
