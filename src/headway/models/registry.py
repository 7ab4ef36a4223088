"""From a config.json's architecture to the family file that understands it.

A family is any module of this package that defines ARCHITECTURES, `spec` and `weights`; adding the file is enough. One
from outside is named as a module, or as an object in one, and its spec's `family` is that name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, cast

import headway.models
from headway import plugins
from headway.errors import ConfigError, ModelFormatError
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


def read_config(config: Config, outside: str | None = None) -> ModelSpec:
    """The spec of a config.json; a family from `outside` goes before ours."""
    if outside is not None:
        family = _outside_family(outside)
        if set(_architectures(config)) & set(family.ARCHITECTURES):
            return replace(family.spec(config), family=outside)
    return find_family(config).spec(config)


def find_family(config: Config) -> Family:
    """The family of a config.json, by its `architectures`."""
    known = families()
    for name in _architectures(config):
        if name in known:
            return known[name]
    named = config.get("architectures")
    got = repr(named)[:120] if named else "no architecture"
    raise ModelFormatError(f"the model's config names {got}; headway runs {', '.join(sorted(known))}")


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Every parameter of a spec, in the order of the computation."""
    if spec.family in plugins.names("models"):
        return list(cast(Family, importlib.import_module(f"headway.models.{spec.family}")).weights(spec))
    return list(_outside_family(spec.family).weights(spec))


def _outside_family(name: str) -> Family:
    if name in plugins.names("models"):
        raise ConfigError(f"model_family is {name!r}, which headway has a file of its own for; rename yours")
    family = plugins.load_module("models", name)
    missing = [part for part in ("ARCHITECTURES", "spec", "weights") if not hasattr(family, part)]
    if missing:
        raise ConfigError(f"model_family is {name!r}, which has no {missing[0]}; see docs/adding-a-model.md")
    return cast(Family, family)


def _architectures(config: Config) -> list[str]:
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []
