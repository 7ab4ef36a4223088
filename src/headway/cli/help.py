"""Help in two tiers: `--help` shows the options that matter to most, `--help-all` every one.

Paragraphs are as wide as the terminal, wherever the source breaks its lines.
"""

from __future__ import annotations

import re
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import DefaultFormatter, HelpPanel
    from rich.console import Console, ConsoleOptions

ESSENTIAL = frozenset(
    {
        *("--model", "--dtype", "--device", "--max-model-len"),
        *("--kv-memory-gb", "--max-num-seqs", "--target-itl-ms", "--policy"),
        *("--host", "--port", "--api-key", "--config"),
        *("--join", "--key-file", "--tls-ca", "--name", "--listen-engines", "--engine-key-file"),
        *("--ray", "--ray-min", "--ray-max"),
        *("--temperature", "--top-p", "--max-tokens", "--seed", "--n"),
    }
)
"""Shown by `--help`; what a command has beside the groups that commands share is always shown."""
OWN = ("Arguments", "Parameters", "Made-up load", "Each replica", "Fleet")  # the titles of a command's own
_BREAK = re.compile(r"(?<=\S)\n(?=\S)")  # within a paragraph; examples are indented

HELP_ALL = "--help-all"
HELP_FLAGS = ("--help", "-h", HELP_ALL)
"""For every App: one below another does not take them from it."""


class Help:
    """Prints a help page; unless it `shows_all`, without the options that few need."""

    def __init__(self, *, shows_all: bool) -> None:
        self._shows_all = shows_all

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        panel = copy(panel)
        if panel.format == "parameter" and panel.title not in OWN and not self._shows_all:
            panel.entries = [
                entry for entry in panel.entries if ESSENTIAL & {*entry.positive_names, *entry.positive_shorts}
            ]
        for entry in panel.entries:
            _reflow(entry.description)
        if panel.entries:
            _whole()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        _whole().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        _reflow(description)
        _whole().render_description(console, options, description)


def _reflow(text: Any) -> None:
    """Join the lines of each paragraph, in place."""
    from rich.text import Text

    inner = getattr(text, "primary_renderable", None)
    if isinstance(inner, Text):
        inner.plain = _BREAK.sub(" ", inner.plain)


def _whole() -> DefaultFormatter:
    from cyclopts.help import DefaultFormatter  # only help needs it

    return DefaultFormatter()
