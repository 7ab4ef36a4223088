"""What an installation may lack: the optional packages, and what to install to get them.

The CPU engine needs none of them. Another project has the name headway where pip looks, so extras come from a clone.
"""

from __future__ import annotations

from importlib import import_module

from headway.errors import ConfigError

EXTRAS = ("torch", "cuda")


def require_torch(what: str, instead: str = "", extra: str = "torch") -> None:
    """Import torch; where that fails, say what needs it, how to get it, and perhaps what to do instead."""
    try:
        import_module("torch")
    except ImportError as error:
        raise ConfigError(missing(what, "torch", instead, extra)) from error


def missing(what: str, package: str, instead: str = "", extra: str = "torch") -> str:
    """That `what` needs a package that is not there, and which extra brings it."""
    advice = f"install it by pip install '.[{extra}]' in a clone of headway"
    return f"{what} needs {package}, which is not installed; {advice}{instead and f', or {instead}'}"
