"""Sampling values that a model's authors recommend, as its files keep them.

Owns the names under which generation_config.json and GGUF metadata have them. A value that no request may have is left
out and logged: it is a recommendation, and the model runs without it. Refuses to know who uses the values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headway.errors import RequestError
from headway.values.params import SamplingParams

log = logging.getLogger(__name__)

_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def of_directory(generation: Mapping[str, object]) -> dict[str, float]:
    """From what generation_config.json holds. Its `do_sample` is not read: a temperature of 0 says the same."""
    return _read(generation, _NAMES, "generation_config.json")


def of_gguf(metadata: Mapping[str, object]) -> dict[str, float]:
    """From a GGUF file's metadata."""
    return _read(metadata, _GGUF_NAMES, "the GGUF metadata")


def _read(found: Mapping[str, object], names: Mapping[str, str], where: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, name in names.items():
        value = found.get(key)
        if value is None:
            continue
        if isinstance(value, float):
            value = float(f"{value:.6g}")  # GGUF keeps float32, whose 0.2 is not the 0.2 that was meant
        if name == "top_k" and value == -1:  # "off", as other engines write it
            value = 0
        try:
            values[name] = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
        except RequestError as error:
            log.warning("a recommended sampling value in %s is not used: %s", where, error)
    return values
