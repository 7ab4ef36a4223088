"""Resolves options set to `auto` on this machine. Needs no torch, so that a config prints at once."""

from __future__ import annotations

from headway.config import EngineConfig, ModelConfig, ServeConfig
from headway.config_text import parse_adapters
from headway.errors import ConfigError
from headway.kernels import library
from headway.kernels.formats import resolve_dtype, resolve_kv_dtype


def formats(config: EngineConfig) -> dict[str, str]:
    """The number formats an engine with this configuration runs in, by field."""
    level = library.chosen_level(config.model.kernels)
    dtype = resolve_dtype(config.model.dtype, level)
    return {"dtype": dtype, "kv_dtype": resolve_kv_dtype(config.cache.kv_dtype, dtype)}


def only_adapter(config: ModelConfig) -> str:
    """The adapter that answers where none is named: the one that is given, if any."""
    names = [source.name for source in parse_adapters(config.adapter)]
    if len(names) > 1:
        raise ConfigError(f"adapter is given {len(names)} times: {', '.join(names)}; here one answers, so give one")
    return names[0] if names else ""


def describe(config: EngineConfig | ServeConfig) -> str:
    """The configuration as TOML, each `auto` with the value chosen here."""
    from headway.cli.args import to_toml  # needs the command line's packages

    engine = config.engine if isinstance(config, ServeConfig) else config
    chosen = formats(engine)
    asked = {"dtype": engine.model.dtype, "kv_dtype": engine.cache.kv_dtype}
    return to_toml(config, {name: f"{chosen[name]} here" for name, value in asked.items() if value == "auto"})
