"""Output of a bench: a progress bar on stderr if that is a terminal, a table, and one JSON object as the last line.

Knows no measurement. Standard output carries only results, so that a program may read it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from headway.errors import EngineError

_WIDEST = 1000  # columns; no table comes near it
Update = Callable[[int], None]
"""Called with the amount done, in the unit of the bar's total."""


def end(main: Callable[[], int | None]) -> NoReturn:
    """Run a bench's `main` as a program: what it cannot use is one line on stderr and status 2."""
    try:
        sys.exit(main() or 0)
    except (EngineError, OSError) as error:
        print(f"headway.bench: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def progress(title: str, total: int) -> Iterator[Update]:
    """A bar that is erased at the end. Without a terminal it prints nothing."""
    if not sys.stderr.isatty() or not _has_rich():
        yield lambda done: None
        return
    from rich.console import Console  # only a terminal needs it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawing shares the cores with what is measured: twice a second is enough.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Columns on standard output; the first one is text, the others are numbers and align right."""
    if not _has_rich():
        _print_plain(header, rows, title)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(show(cell) for cell in row))
    if title:
        print(title)
    console = Console(file=sys.stdout, width=_WIDEST, highlight=False)
    # A cut number is worse than a long line, so the table is as wide as it needs to be.
    console.print(table, width=console.measure(table).maximum)


def _has_rich() -> bool:
    try:
        import rich
    except ImportError:
        return False
    return bool(rich)


def _print_plain(header: Sequence[str], rows: Sequence[Sequence[object]], title: str) -> None:
    """The same where `rich` is missing: machines that have a device and little else."""
    lines = [list(header), *([show(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if title:
        print(title)
    for line in lines:
        print(line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)))


def show(cell: object) -> str:
    """A number with as many digits as mean something."""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    return "" if cell is None else str(cell)


def print_json(record: Mapping[str, object]) -> None:
    """One object on one line, the last of the output."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
