"""Flags, environment, config file: one precedence for every command, mapped onto the config tree.

    flags  >  HEADWAY_<FIELD>  >  --config file  >  defaults

The dataclasses of `headway.config` are the flags: a field is a flag, its docstring is the help. This file knows
no field by name, except that a model may also be given as a bare argument.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, Argument, ArgumentCollection, Group, Parameter, Token

from headway.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SamplingConfig,
    SchedulerConfig,
    ServeConfig,
    ServerConfig,
)
from headway.config_ray import RayConfig
from headway.errors import ConfigError
from headway.values.params import SamplingParams

Source = Callable[[App, tuple[str, ...], ArgumentCollection], None]

SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "sampling": SamplingConfig,
    "server": ServerConfig,
    "ray": RayConfig,
}
SECRETS = frozenset({"api_key", "engine_key"})
# Off unless given; the help need not say so.
Switch = Annotated[bool, Parameter(show_default=False)]


@dataclass(frozen=True, slots=True)
class Common:
    """Options of every command that takes a configuration."""

    config: Path | None = None
    """A TOML, JSON or YAML file with these options; --print-config shows its form."""
    print_config: Switch = False
    """Print the resolved configuration as TOML and exit."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, with the meanings of the API's fields of the same names."""

    max_tokens: int = 128
    """Most tokens in an answer."""
    temperature: float | None = None
    """0 takes the most likely token; up to 2. As the model recommends if not given."""
    top_p: float | None = None
    """Sample from the most likely tokens that hold this much probability. As the model recommends if not given."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens; 0 is off. As the model recommends if not given."""
    min_p: float | None = None
    """Leave out tokens below this share of the likeliest one's probability. As the model recommends if not given."""
    repetition_penalty: float | None = None
    """Above 1, tokens seen before become less likely. As the model recommends if not given."""
    seed: int | None = None
    """Equal seeds give equal answers; drawn at random if not given."""
    stop: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """End the answer before this text; may be given several times."""
    ignore_eos: Switch = False
    """Go on after the model's end token, up to --max-tokens."""

    def given(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were given; RequestError if one is out of range."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        SamplingParams(**values)
        return values


@dataclass(frozen=True, slots=True)
class ChatSampling(Sampling):
    """A turn of a conversation ends by itself, or where the server's default length ends it."""

    max_tokens: int | None = None  # type: ignore[assignment]
    """Most tokens in an answer; as --default-max-tokens, or as the server has it, if not given."""


@dataclass(frozen=True, slots=True)
class BatchSampling(Sampling):
    """What only a batch of prompts can use."""

    n: int = 1
    """Answers per prompt."""
    logprobs: int | None = None
    """Report each token's log probability and this many alternatives (with --json)."""


def _flat(title: str, place: int, **how: Any) -> Parameter:
    """Show a dataclass's fields as flags of their own, under one heading of the help."""
    return Parameter(name="*", group=Group(title, sort_key=place), **how)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything `EngineConfig` holds, as flags."""

    model: Annotated[ModelConfig, _flat("Model", 2)] = field(default_factory=ModelConfig)
    cache: Annotated[CacheConfig, _flat("KV cache", 3, negative_bool="no-")] = field(default_factory=CacheConfig)
    scheduler: Annotated[SchedulerConfig, _flat("Scheduler", 4)] = field(default_factory=SchedulerConfig)
    sampling: Annotated[SamplingConfig, _flat("Sampling defaults", 5)] = field(default_factory=SamplingConfig)

    def config(self, positional: str | None) -> EngineConfig:
        """The engine's tree; a model given as a bare argument wins over the option."""
        model = self.model if positional is None else replace(self.model, model=positional)
        return EngineConfig(model=model, cache=self.cache, scheduler=self.scheduler, sampling=self.sampling)


EngineFlags = Annotated[EngineOptions, Parameter(name="*")]
ServerFlags = Annotated[ServerConfig, _flat("Server", 6, negative_bool="no-")]
ChatFlags = Annotated[ChatSampling, _flat("Sampling", 1, negative_iterable=())]
BatchFlags = Annotated[BatchSampling, _flat("Sampling", 1, negative_iterable=())]
RayFlags = Annotated[RayConfig, _flat("Ray", 7)]
CommonFlags = Annotated[Common, _flat("Common", 8)]


def sources(environ: Mapping[str, str]) -> list[Source]:
    """What fills in options that were not given as flags, in order of precedence, and then checks them."""
    return [environment(environ), config_file, name_at_url, check_numbers]


def environment(environ: Mapping[str, str]) -> Source:
    def fill(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        for name, argument in _options(arguments):
            variable = f"HEADWAY_{name.upper()}"
            if not argument.tokens and variable in environ:
                argument.append(Token(keyword=variable, value=environ[variable], source="environment"))

    return fill


def config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    options = dict(_options(arguments))
    if "config" not in options or not options["config"].tokens:
        return
    path = Path(options["config"].tokens[0].value)
    for name, value in read_config(path).items():
        # A file may hold the whole tree: keys that this command does not take (a port, say) are ignored.
        if name in options and not options[name].tokens:
            for index, each in enumerate([value] if isinstance(value, str) else value):
                keyword = f"{name} in {path}"
                options[name].append(Token(keyword=keyword, value=each, source=os.fspath(path), index=index))


def name_at_url(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A model named beside a server is the name it has there, also if it is the default of this machine.

    Other flags of an engine are refused there: the server has its own.
    """
    options = dict(_options(arguments))
    if not {"url", "model", "served_model_name"} <= options.keys() or not options["url"].tokens:
        return
    for part in (ModelConfig, CacheConfig, SchedulerConfig, SamplingConfig):
        for name in {each.name for each in fields(part)} & options.keys() - {"model", "served_model_name"}:
            if any(token.source == "cli" for token in options[name].tokens):
                flag = options[name].name
                raise ConfigError(
                    f"{flag} is for a model in this process; the server at --url decides it: leave one out"
                )
    flags = [token for token in options["model"].tokens if token.source == "cli"]
    if flags and not options["served_model_name"].tokens:
        options["served_model_name"].append(Token(keyword="--model", value=flags[-1].value, source="cli"))


def check_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take numbers strictly: cyclopts alone would round 1.5 to 2 for a whole number."""
    for name, argument in _options(arguments):
        kinds = {argument.hint, *get_args(argument.hint)}
        for token in argument.tokens:
            given_as = token.keyword or name
            if int in kinds and not re.fullmatch(r"[+-]?[0-9]{1,20}", token.value):
                raise ConfigError(f"{given_as} is {token.value!r}; allowed: a whole number")
            if float in kinds and not _is_finite(token.value):
                raise ConfigError(f"{given_as} is {token.value!r}; allowed: a finite number")


def read_config(path: Path) -> dict[str, str | list[str]]:
    """A config file as flat field -> text or texts. Keys are top-level or in tables [model], [cache], ...; no other."""
    flat: dict[str, str | list[str]] = {}
    for key, value in _parse(path).items():
        is_section = isinstance(value, Mapping)
        _known(key, SECTIONS if is_section else [f.name for kind in SECTIONS.values() for f in fields(kind)], path)
        for name, item in value.items() if is_section else [(key, value)]:
            if is_section:
                _known(name, [f.name for f in fields(SECTIONS[key])], path)
            if name in flat:
                raise ConfigError(f"{path}: {name!r} is given twice; keep one of them")
            if item is not None:
                flat[name] = _text(item, name, path)
    return flat


def to_toml(config: EngineConfig | ServeConfig, notes: Mapping[str, str] | None = None) -> str:
    """The resolved values in the form `--config` reads. Unset fields are comments, secrets are not shown.

    A field's note follows its value.
    """
    engine = config.engine if isinstance(config, ServeConfig) else config
    parts: dict[str, Any] = {name: getattr(engine, name) for name in ("model", "cache", "scheduler", "sampling")}
    if isinstance(config, ServeConfig):
        parts["server"], parts["ray"] = config.server, config.ray
    return "\n\n".join("\n".join([f"[{name}]", *_lines(part, notes or {})]) for name, part in parts.items())


def _lines(part: Any, notes: Mapping[str, str]) -> Iterator[str]:
    for name in (f.name for f in fields(part)):
        value = getattr(part, name)
        if value is None:
            yield f"# {name} = not set"
        elif name in SECRETS:
            yield f"# {name} is set and not shown"
        else:
            # JSON's strings, numbers and booleans are TOML's too.
            note = f"  # {notes[name]}" if name in notes else ""
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}{note}"


def _options(arguments: ArgumentCollection) -> Iterator[tuple[str, Argument]]:
    for argument in arguments:
        if argument.name.startswith("--"):
            yield argument.name[2:].replace("-", "_"), argument


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            data = _parse_yaml(text, path)
        else:
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the config file {path} is broken: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"the config file {path} holds {type(data).__name__}; it must map field names to values")
    return data


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        import yaml  # optional: TOML and JSON need no package
    except ImportError as error:
        raise ConfigError(f"{path} is YAML, which needs the package pyyaml; install it or write TOML") from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _known(key: str, allowed: Any, path: Path) -> None:
    if key not in allowed:
        close = get_close_matches(str(key), list(allowed), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(sorted(allowed))}"
        raise ConfigError(f"unknown key {key!r} in {path}; {hint}")


def _text(value: object, name: str, path: Path) -> str | list[str]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{path}: {name} is {value!r}; allowed: a text, a number, true or false")
