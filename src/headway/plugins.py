"""Finding plug-ins by name: the file's name under `headway.<kind>` is the plug-in's name.

A plug-in file exposes `PLUGIN`, a class or a callable. Code from outside is named `my.module:Thing`; it is installed or
lies in the current directory. This file knows no kind of plug-in and keeps no list: the folder is the list.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.extras import EXTRAS, missing


def names(kind: str) -> list[str]:
    """The names under `headway.<kind>`, sorted; files that start with an underscore are helpers, not plug-ins."""
    package = import_module(f"headway.{kind}")
    found = (info.name for info in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def load(kind: str, name: str) -> Any:
    """The plug-in `name` of `kind`: a file of ours, or `my.module:Thing` from outside."""
    if ":" in name:
        return _outside(kind, name)
    known = names(kind)
    if name not in known:
        raise ConfigError(f"no {kind} named {name!r}; allowed: {', '.join(known) or 'none yet'}, or my.module:Thing")
    try:
        module = import_module(f"headway.{kind}.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "headway"):
            raise
        extra = name if name in EXTRAS else package
        raise ConfigError(missing(f"{kind} {name}", package, extra=extra)) from error
    if not hasattr(module, "PLUGIN"):
        raise ConfigError(f"headway.{kind}.{name} has no PLUGIN; a plug-in file sets it to its class or callable")
    return module.PLUGIN


def load_module(kind: str, name: str) -> Any:
    """From outside, where a module itself may be the plug-in: `my.module`, or `my.module:Thing`."""
    return _outside(kind, name) if ":" in name else _import(kind, name, name)


def _outside(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    module = _import(kind, name, module_name)
    thing = getattr(module, attribute, None)
    if thing is None:
        raise ConfigError(f"module {module_name!r} has no {attribute!r} for {kind}; write it as my.module:Thing")
    return thing


def _import(kind: str, name: str, module_name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:  # an installed command does not look there by itself
        sys.path.append(here)
    try:
        return import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot import {module_name!r} for {kind} {name!r}: {error}") from error
    except Exception as error:  # whatever their code does wrong
        fault = f"{type(error).__name__}: {error}"
        if not isinstance(error, SyntaxError):  # which says itself where it is
            last = traceback.extract_tb(error.__traceback__)[-1]
            fault += f" ({Path(last.filename).name}, line {last.lineno})"
        raise ConfigError(f"cannot import {module_name!r} for {kind} {name!r}: {fault}") from error
