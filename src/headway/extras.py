"""What an installation may lack: the optional packages, and what to install to get them.

The CPU engine needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from headway.about import DISTRIBUTION
from headway.errors import ConfigError

EXTRAS = ("torch", "cuda", "ray", "otel")


def require_torch(what: str, instead: str = "", extra: str = "torch") -> None:
    """Import torch; where that fails, say what needs it, how to get it, and perhaps what to do instead."""
    try:
        import_module("torch")
    except ImportError as error:
        raise ConfigError(missing(what, "torch", instead, extra)) from error


def has_ray() -> bool:
    """True if Ray is installed; it is not imported, which takes a second. A mere folder of that name is not Ray."""
    spec = find_spec("ray")
    return spec is not None and spec.origin is not None


def missing(what: str, package: str, instead: str = "", extra: str = "torch") -> str:
    """That `what` needs a package that is not there, and which extra brings it."""
    return f"{what} needs {package}, which is not installed; {how_to_get(extra)}{instead and f', or {instead}'}"


def how_to_get(extra: str, package: Path = Path(__file__).parent) -> str:
    """The command that installs an extra: into the clone that `package` is part of, else beside the installed one."""
    root = package.parent.parent
    if package.parent.name == "src" and (root / "pyproject.toml").is_file():
        return f"install it by pip install -e '.[{extra}]' in {root}"
    return f"install it by pip install '{DISTRIBUTION}[{extra}]'"
