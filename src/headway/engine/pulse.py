"""What an engine process shows of itself without being asked: one page of memory that its parent reads too.

    bytes    0  turns u64 | activity u64 | steps u64 | expected f64        little-endian, each written on its own
          4096  text: where the process puts its stacks when it crashes or is asked for them

A process that is stopped or hangs cannot answer a question; the page shows what it did last. This file owns the layout
and the descriptor. What follows from a page that does not change is `watchdog`'s.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import signal
import struct
import tempfile
from enum import IntEnum
from typing import NamedTuple

PAGE_BYTES = 4096
MAX_STACK_BYTES = 64 * 1024
STACK_SIGNAL = signal.SIGUSR2  # asks an engine process for its stacks
_TURNS, _ACTIVITY, _STEPS, _EXPECTED = range(0, 32, 8)
_WORD = struct.Struct("<Q")
_REAL = struct.Struct("<d")


class Activity(IntEnum):
    """What the engine's loop does."""

    LOADING = 0
    WAITING = 1  # for commands, with nothing to do
    WORKING = 2  # it takes commands in or does a step
    SENDING = 3  # it hands messages over, which may have to wait for the reader


class Beat(NamedTuple):
    """The page at one moment."""

    turns: int = 0  # changes of activity
    activity: Activity = Activity.LOADING
    steps: int = 0  # committed
    expected_s: float = math.nan  # predicted length of the step under way; not a number: unknown


class Pulse:
    """The engine's side: writes the page. `turns` grows with every change of activity."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self._turns = 0
        self.expect(math.nan)

    def enter(self, activity: Activity) -> None:
        """The loop begins something else."""
        self._turns += 1
        page = self._page
        _WORD.pack_into(page, _ACTIVITY, activity)
        _WORD.pack_into(page, _TURNS, self._turns)

    def expect(self, seconds: float) -> None:
        """The step that begins now will take about so long."""
        _REAL.pack_into(self._page, _EXPECTED, seconds)

    def committed(self, steps: int) -> None:
        """So many steps are committed."""
        _WORD.pack_into(self._page, _STEPS, steps)


def leave_stacks(fd: int) -> None:
    """Write the stacks of all threads behind the page when this process crashes or gets `STACK_SIGNAL`."""
    os.lseek(fd, PAGE_BYTES, os.SEEK_SET)
    faulthandler.enable(fd)
    faulthandler.register(STACK_SIGNAL, fd, all_threads=True)


class PulseReader:
    """The parent's side: owns the descriptor until `close`. A page that another process made is read by its `fd`."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is not None:
            self.fd = fd
            self._page = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
            return
        # A file in memory where there is such a thing: a page of a full disk would end the process that writes to it.
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("headway-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, PAGE_BYTES)
        self._page = mmap.mmap(self.fd, PAGE_BYTES, prot=mmap.PROT_READ)

    def read(self) -> Beat:
        """The page as it is now."""
        turns, activity, steps = (_WORD.unpack_from(self._page, at)[0] for at in (_TURNS, _ACTIVITY, _STEPS))
        known = Activity(activity) if activity in tuple(Activity) else Activity.WORKING
        return Beat(turns, known, steps, _REAL.unpack_from(self._page, _EXPECTED)[0])

    def stacks(self) -> str:
        """What the process wrote of its stacks so far."""
        return os.pread(self.fd, MAX_STACK_BYTES, PAGE_BYTES).decode(errors="replace")

    def close(self) -> None:
        if self.fd >= 0:
            self._page.close()
            os.close(self.fd)
            self.fd = -1
