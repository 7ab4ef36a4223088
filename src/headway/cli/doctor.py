"""`headway doctor`: what this machine offers and what headway will use of it. Changes nothing."""

from __future__ import annotations

from headway.cli import machine
from headway.cli.args import Switch

EXAMPLES = """Examples:
  headway doctor
  headway doctor --json"""


def doctor(*, cache_dir: str | None = None, json: Switch = False) -> int:
    """Report what the machine offers (CPU, kernels, GPU, memory) and what will be used.

    Parameters
    ----------
    cache_dir
        Where converted models are kept; ~/.cache/headway if not given.
    json
        Print one JSON object.
    """
    machine.report(cache_dir, as_json=json)
    return 0
