"""`headway models`: what can be served by name, and where it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.terminal import format_bytes, table

if TYPE_CHECKING:
    from headway.modelfile.cache import ModelCache

EXAMPLES = """Examples:
  headway models
  headway models --cache-dir /data/headway"""


def models(*, cache_dir: str | None = None) -> int:
    """List the bundled models and what the cache holds.

    Parameters
    ----------
    cache_dir
        Where converted models are kept; ~/.cache/headway if not given.
    """
    from headway.modelfile.source import list_models  # model files are not needed to print help

    rows = [
        [model.name, model.state, format_bytes(model.size) if model.size else "", str(model.where or "")]
        for model in list_models(open_cache(cache_dir))
    ]
    print(table(["NAME", "STATE", "SIZE", "WHERE"], rows))
    return 0


def open_cache(cache_dir: str | None) -> ModelCache:
    """The cache as the engine finds it."""
    from headway.modelfile.cache import ModelCache, default_root  # as above

    return ModelCache(Path(cache_dir).expanduser() if cache_dir else default_root())
