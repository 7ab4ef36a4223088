"""`headway models`: what can be served by name, where it is, fetching and removing."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from headway.cli.terminal import format_bytes, table
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.modelfile.cache import ModelCache
    from headway.modelfile.source import ModelEntry

EXAMPLES = """Examples:
  headway models
  headway models pull HuggingFaceTB/SmolLM2-360M-Instruct
  headway models pull https://example.org/model.gguf --sha256 0123...
  headway models rm HuggingFaceTB/SmolLM2-360M-Instruct
  headway models prune --keep-gb 5"""


def create_app() -> App:
    """`headway models` and its commands."""
    app = App(name="models", help="List, fetch and remove models.", help_epilogue=EXAMPLES, sort_key=4)
    app.default(models)
    app.command(pull)
    app.command(rm)
    app.command(prune)
    return app


def models(*, cache_dir: str | None = None) -> int:
    """List the bundled models, those that were pulled, and what is converted.

    Parameters
    ----------
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    rows = []
    for model in _list(open_cache(cache_dir)):
        size = format_bytes(model.size) if model.size else ""
        rows.append([model.name, model.state, size, _ago(model.used), str(model.where or "")])
    print(table(["NAME", "STATE", "SIZE", "USED", "WHERE"], rows))
    return 0


def pull(
    name: str,
    /,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    endpoint: str | None = None,
    cache_dir: str | None = None,
) -> int:
    """Fetch a model; a download that was cut off is resumed.

    Parameters
    ----------
    name
        owner/name of a hub, or the URL of a .gguf file.
    revision
        Branch, tag or commit of the hub's repository.
    sha256
        What the file at a URL must have; files of a hub are checked by what the hub says.
    endpoint
        Address of the hub; HF_ENDPOINT or https://huggingface.co if not given.
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    from headway.modelfile.pull import pull as fetch  # not needed to print help

    def show(here: int, total: int) -> None:
        if sys.stderr.isatty():
            of = f" of {format_bytes(total)}" if total else ""
            print(f"\r{format_bytes(here)}{of}   ", end="", file=sys.stderr, flush=True)

    path = fetch(name, open_cache(cache_dir), revision=revision, endpoint=endpoint, sha256=sha256, progress=show)
    print(f"{path}\nserve it with: headway serve {path if path.is_file() else name}")
    return 0


def rm(*names: str, cache_dir: str | None = None) -> int:
    """Remove models that were pulled, and what was converted from a model.

    Parameters
    ----------
    names
        As `headway models` lists them.
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    cache = open_cache(cache_dir)
    listed = [model for model in _list(cache) if model.state in ("pulled", "converted")]
    known = ", ".join(sorted({model.name for model in listed})) or "nothing"
    if not names:
        raise ConfigError(f"no model was named; there is {known}")
    for name in names:
        if not any(model.name == name for model in listed):
            raise ConfigError(f"there is no {name!r} that was pulled or converted; there is {known}")
    for model in listed:
        if model.name in names:
            _drop(model)
    return 0


def prune(*, keep_gb: float = 10.0, cache_dir: str | None = None) -> int:
    """Remove conversions, those not used for longest first, until the rest takes no more than so much.

    Parameters
    ----------
    keep_gb
        Gigabytes that conversions may keep; 0 removes all. They are made anew when they are needed.
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    if not keep_gb >= 0:
        raise ConfigError(f"keep_gb is {keep_gb}; allowed: 0 or more")
    converted = [model for model in _list(open_cache(cache_dir)) if model.state == "converted"]
    left = sum(model.size for model in converted)
    for model in sorted(converted, key=lambda model: model.used or 0.0):
        if left > keep_gb * 1e9:
            _drop(model)
            left -= model.size
    print(f"conversions take {format_bytes(left)}")
    return 0


def open_cache(cache_dir: str | None) -> ModelCache:
    """The cache as the engine finds it."""
    from headway.modelfile.cache import ModelCache, default_root  # model files are not needed to print help

    return ModelCache(Path(cache_dir).expanduser() if cache_dir else default_root())


def _list(cache: ModelCache) -> list[ModelEntry]:
    from headway.modelfile.source import list_models  # as above

    return list_models(cache)


def _drop(model: ModelEntry) -> None:
    assert model.where is not None
    if model.where.is_dir():
        shutil.rmtree(model.where)
    else:
        model.where.unlink()
    print(f"removed {model.name} ({model.state}, {format_bytes(model.size)})")


def _ago(used: float | None) -> str:
    """How long ago that was."""
    if used is None:
        return ""
    days = max(0.0, time.time() - used) / 86400
    return "today" if days < 1 else "a day ago" if days < 2 else f"{days:.0f} days ago"
