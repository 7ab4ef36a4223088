"""Help in two tiers: `--help` shows the options that matter to most, `--help-all` every one."""

from __future__ import annotations

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
        *("--temperature", "--top-p", "--max-tokens", "--seed", "--n"),
    }
)
"""Shown by `--help`; what a command has beside the groups that commands share is always shown."""
OWN = "Parameters"  # the title of a command's own options


class ShortHelp:
    """Prints a help page without the options that few need."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if panel.format == "parameter" and panel.title != OWN:
            panel = copy(panel)
            panel.entries = [
                entry for entry in panel.entries if ESSENTIAL & {*entry.positive_names, *entry.positive_shorts}
            ]
        if panel.entries:
            _whole()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        _whole().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        _whole().render_description(console, options, description)


def _whole() -> DefaultFormatter:
    from cyclopts.help import DefaultFormatter  # only help needs it

    return DefaultFormatter()
