"""From a config.json's architecture to the family file that understands it.

A family is any module of this package that defines ARCHITECTURES, `spec` and `weights`; adding the file is enough.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import headway.models
from headway.errors import ModelFormatError
from headway.models.params import Parameter
from headway.models.spec import Config, ModelSpec

_DECODERS = frozenset({"cuda", "decoder", "native"})
"""Files of this package that run models of any family; that of CUDA devices imports torch, which may not be there."""


class Family(Protocol):
    """What a family file offers; the module itself is the object."""

    ARCHITECTURES: Sequence[str]

    def spec(self, config: Config) -> ModelSpec:
        """Read a config of one of these architectures; ModelFormatError if it cannot be run."""

    def weights(self, spec: ModelSpec) -> Iterator[Parameter]:
        """Every parameter of such a model."""


def families() -> dict[str, Family]:
    """Architecture name -> family, for all family files."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(headway.models.__path__):
        if info.name in _DECODERS:
            continue
        module = importlib.import_module(f"headway.models.{info.name}")
        for architecture in getattr(module, "ARCHITECTURES", ()):
            found[architecture] = cast(Family, module)
    return found


def read_config(config: Config) -> ModelSpec:
    """The spec of a config.json."""
    return find_family(config).spec(config)


def find_family(config: Config) -> Family:
    """The family of a config.json, by its `architectures`."""
    known = families()
    named = config.get("architectures")
    names = named if isinstance(named, list | tuple) else []
    for name in names:
        if isinstance(name, str) and name in known:
            return known[name]
    got = repr(named)[:120] if named else "no architecture"
    raise ModelFormatError(f"the model's config names {got}; headway runs {', '.join(sorted(known))}")


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Every parameter of a spec, in the order of the computation."""
    return list(cast(Family, importlib.import_module(f"headway.models.{spec.family}")).weights(spec))
