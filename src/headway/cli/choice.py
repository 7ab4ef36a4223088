"""Resolves options set to `auto` on this machine. Needs no torch, so that a config prints at once."""

from __future__ import annotations

from headway.config import EngineConfig, ServeConfig
from headway.kernels import library
from headway.kernels.formats import resolve_dtype, resolve_kv_dtype


def formats(config: EngineConfig) -> dict[str, str]:
    """The number formats an engine with this configuration runs in, by field."""
    level = library.chosen_level(config.model.kernels)
    dtype = resolve_dtype(config.model.dtype, level)
    return {"dtype": dtype, "kv_dtype": resolve_kv_dtype(config.cache.kv_dtype, dtype)}


def describe(config: EngineConfig | ServeConfig) -> str:
    """The configuration as TOML, each `auto` with the value chosen here."""
    from headway.cli.args import to_toml  # needs the command line's packages

    engine = config.engine if isinstance(config, ServeConfig) else config
    chosen = formats(engine)
    asked = {"dtype": engine.model.dtype, "kv_dtype": engine.cache.kv_dtype}
    return to_toml(config, {name: f"{chosen[name]} here" for name, value in asked.items() if value == "auto"})
