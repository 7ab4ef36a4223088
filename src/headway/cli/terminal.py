"""Small things about a terminal: tables, sizes, Ctrl-C, and the progress line on stderr. Knows no command."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns two blanks apart, so that a pipe can read it as well as a person."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """Something that turns on stderr while the body runs. Without a terminal it prints nothing."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # only a terminal needs it

    with Console(stderr=True).status(title):
        yield


class Bar:
    """A progress bar on stderr, and what is printed to stdout above it."""

    def __init__(self, bar: Progress | None = None, task: TaskID | None = None) -> None:
        self._bar, self._task = bar, task

    def update(self, done: int, num_tokens: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, tokens=num_tokens)

    def write(self, line: str) -> None:
        """A line of output, at once; the bar makes way for it where both are at the same terminal."""
        is_in_the_way = self._bar is not None and sys.stdout.isatty()
        if self._bar is not None and is_in_the_way:
            self._bar.stop()
        print(line, flush=True)
        if self._bar is not None and is_in_the_way:
            self._bar.start()


@contextmanager
def progress(title: str, total: int) -> Iterator[Bar]:
    """A bar that is erased at the end. Without a terminal it prints nothing of its own.

    Nor where output goes into a pipe: what reads it mostly writes to the same terminal, into the bar.
    """
    if not sys.stderr.isatty() or _is_pipe(sys.stdout):
        yield Bar()
        return
    from rich.console import Console  # only a terminal needs it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    # What is printed to stdout stays there: rich would send it to its own console, which is stderr.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        yield Bar(bar, bar.add_task(title, total=total, tokens=0))


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # replaced by something that is no file
        return False


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C takes effect where the yielded function is called, so that no step of an engine is cut in two.

    A second Ctrl-C takes effect at once, as outside.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    came = False
    before = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
