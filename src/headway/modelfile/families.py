"""What model files need to know of a family file: its architectures, and its names in GGUF files.

Families belong to `headway.models`, which this package does not know: they are found by name, and looked for only where
a model is of none of the architectures in `gguf_model`, so that nothing is imported for those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from headway import plugins
from headway.errors import ModelFormatError


class GgufNames(NamedTuple):
    """How the GGUF files of a family are read."""

    architecture: str  # as in config.json
    layer: Mapping[str, str]  # tensors of a layer: name in the file -> name in a checkpoint, where it is not the usual


def check_architecture(where: str, found: object, usual: Collection[str], outside: str | None) -> None:
    """Refuse an architecture that is neither one of the usual ones nor that of a family file."""
    if isinstance(found, str) and found in usual:
        return
    allowed = {*usual, *(name for family in _families(outside) for name in family.ARCHITECTURES)}
    if not isinstance(found, str) or found not in allowed:
        raise ModelFormatError(f"{where} has the architecture {found!r}; allowed: {', '.join(sorted(allowed))}")


def gguf_families(outside: str | None) -> dict[str, GgufNames]:
    """What family files say of GGUF files, by `general.architecture`."""
    return {
        name: GgufNames(family.ARCHITECTURES[0], layer)
        for family in _families(outside)
        for name, layer in getattr(family, "GGUF", {}).items()
    }


def _families(outside: str | None) -> list[Any]:
    found = [] if outside is None else [plugins.load_module("models", outside)]
    found += [import_module(f"headway.models.{name}") for name in plugins.names("models")]
    return [family for family in found if hasattr(family, "ARCHITECTURES")]
