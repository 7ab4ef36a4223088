"""Small things about printing: tables, sizes, and the progress line on stderr. Knows no command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


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


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr: yields `update(done, num_tokens)`. Without a terminal it prints nothing."""
    if not sys.stderr.isatty():
        yield lambda done, num_tokens: None
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, tokens=0)
        yield lambda done, num_tokens: bar.update(task, completed=done, tokens=num_tokens)
