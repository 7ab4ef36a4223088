"""What is shown while a checkpoint is read into memory: a bar on a terminal, a line for every tenth in a log.

Knows no files: the caller says how much is done.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Called with the amount done and the whole, in whatever unit."""


@contextmanager
def shown(title: str) -> Iterator[Report]:
    """A bar that is erased at the end if standard error is a terminal and `rich` is there, else lines."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    try:
        from rich.console import Console  # optional: machines that only run offline jobs go without
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _lines(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str) -> Report:
    said = 0

    def report(done: int, total: int) -> None:
        nonlocal said
        tenth = 10 if done == total else done * 10 // total
        if tenth > said:
            said = tenth
            log.info("%s: %d %%", title, 10 * tenth)

    return report
