"""`headway models`: what can be served by name, where it is, fetching and removing."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from headway.cli.args import Switch
from headway.cli.help import HELP_FLAGS
from headway.cli.terminal import format_bytes, table
from headway.config import ModelConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.modelfile.cache import ModelCache
    from headway.modelfile.source import ModelEntry

CACHE_LIMIT_GB = ModelConfig().cache_limit_gb
EXAMPLES = """Examples:
  headway models
  headway models pull HuggingFaceTB/SmolLM2-360M-Instruct
  headway models pull https://example.org/model.gguf --sha256 0123...
  headway models rm HuggingFaceTB/SmolLM2-360M-Instruct
  headway models prune --keep-gb 5"""


def create_app() -> App:
    """`headway models` and its commands."""
    app = App(
        name="models", help="List, fetch and remove models.", help_epilogue=EXAMPLES, help_flags=HELP_FLAGS, sort_key=4
    )
    app.default(models)
    app.command(models, name="list")
    app.command(pull)
    app.command(rm)
    app.command(prune)
    return app


def models(*, paths: Switch = False, cache_limit_gb: float = CACHE_LIMIT_GB, cache_dir: str | None = None) -> int:
    """List models by name: where they are from, their size, what is converted of them, and when that was last used.

    Conversions are made when a model is first served. When they take more than --cache-limit-gb, those not used for
    longest are removed; those in use never are.

    Parameters
    ----------
    paths
        Show where each of them is.
    cache_limit_gb
        Gigabytes that conversions may take, as for the other commands.
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    cache = open_cache(cache_dir)
    listed = _list(cache)
    rows = []
    for model in listed:
        sizes = [format_bytes(size) if size else "" for size in (model.size, model.converted)]
        rows.append([model.name, model.state, *sizes, ago(model.used, time.time())])
        if paths:
            rows[-1].append(str(model.where or ""))
    print(table(["NAME", "STATE", "SIZE", "CONVERTED", "LAST USED", *(["WHERE"] if paths else [])], rows))
    taken = sum(model.converted for model in listed) / 1e9
    print(f"\nConversions take {taken:.2f} of at most {cache_limit_gb:g} GB in {cache.root}")
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
    """Remove models that were fetched, and what was converted from a model.

    Parameters
    ----------
    names
        As `headway models` lists them.
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    cache = open_cache(cache_dir)
    listed = [model for model in _list(cache) if model.converted or model.state in ("pulled", "cut off", "fetched")]
    known = ", ".join(sorted({model.name for model in listed})) or "nothing"
    if not names:
        raise ConfigError(f"no model was named; there is {known}")
    for name in names:
        if not any(model.name == name for model in listed):
            raise ConfigError(f"there is no {name!r} that was fetched or converted; there is {known}")
    for model in listed:
        if model.name in names:
            _drop(model, cache)
    return 0


def prune(*, keep_gb: float = CACHE_LIMIT_GB, cache_dir: str | None = None) -> int:
    """Remove conversions, those not used for longest first, until the rest takes no more than so much.

    This also happens by itself when a model is converted (--cache-limit-gb). What is in use stays.

    Parameters
    ----------
    keep_gb
        Gigabytes that conversions may keep; 0 removes all. They are made anew when they are needed.
    cache_dir
        Where models are kept; ~/.cache/headway if not given.
    """
    if not keep_gb >= 0:
        raise ConfigError(f"keep_gb is {keep_gb}; allowed: 0 or more")
    cache = open_cache(cache_dir)
    for model, size in cache.prune(int(keep_gb * 1e9)):
        print(f"removed a conversion of {model} ({format_bytes(size)})")
    left = sum(model.converted for model in _list(cache))
    print(f"conversions take {format_bytes(left)}{', all in use' if left > keep_gb * 1e9 else ''}")
    return 0


def open_cache(cache_dir: str | None) -> ModelCache:
    """The cache as the engine finds it."""
    from headway.modelfile.cache import ModelCache, default_root  # model files are not needed to print help

    return ModelCache(Path(cache_dir).expanduser() if cache_dir else default_root())


def _list(cache: ModelCache) -> list[ModelEntry]:
    from headway.modelfile.source import list_models  # as above

    return list_models(cache)


def _drop(model: ModelEntry, cache: ModelCache) -> None:
    gone = []
    if model.converted and model.digest is not None:
        shutil.rmtree(cache.root / model.digest)  # a file that was fetched is in it too
        gone.append(f"{format_bytes(model.converted)} of conversions")
    if model.state != "installed" and model.where is not None and model.where.exists():
        shutil.rmtree(model.where) if model.where.is_dir() else model.where.unlink()
    if model.state in ("pulled", "cut off", "fetched"):
        gone.append(f"{format_bytes(model.size)} that were {model.state}")
    print(f"removed {model.name} ({', '.join(gone)})")


def ago(used: float | None, now: float) -> str:
    """How long before `now` that was."""
    if used is None:
        return ""
    seconds = max(0.0, now - used)
    for unit, size, most in (("minute", 60, 60), ("hour", 3600, 24), ("day", 86400, 1e9)):
        count = int(seconds / size)
        if count < most:
            return "just now" if not count else f"{count} {unit}{'s' if count > 1 else ''} ago"
    return ""
