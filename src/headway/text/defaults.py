"""How an answer is sampled where its request does not say.

    the request  >  --default-temperature and the like  >  the model's recommendation  >  the model's own distribution

Owns that order. Refuses to know where a recommendation comes from (`modelfile.sampling`) and what a request is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from headway.config import SamplingConfig
from headway.errors import RequestError
from headway.values.params import SamplingParams

DEFAULT_MAX_TOKENS = 1024

_FIELDS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of fields that a request leaves out. Without any these are what `SamplingParams()` has."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: as the interface has it

    @staticmethod
    def of(recommended: Mapping[str, float], config: SamplingConfig) -> SamplingDefaults:
        """What the model recommends, where the configuration does not say otherwise."""
        names = [field.name for field in fields(SamplingDefaults)]
        told = {name: getattr(config, f"default_{name}") for name in names}
        return SamplingDefaults(**{**recommended, **_given(told)})

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `SamplingParams`: those given, and these values for the others. None is: not given."""
        for name in given:
            if name not in _FIELDS:
                raise RequestError(f"there is no sampling field {name!r}; allowed: {', '.join(_FIELDS)}", param=name)
        values = {**asdict(self), **_given(given)}
        return {**values, "max_tokens": values["max_tokens"] or DEFAULT_MAX_TOKENS}

    def params(self, given: Mapping[str, Any], room: int) -> SamplingParams:
        """Parameters whose answer, if no length is given, fits into `room` tokens."""
        values = self.fill(given)
        if given.get("max_tokens") is None:
            values["max_tokens"] = max(1, values.get("min_tokens", 0), min(values["max_tokens"], room))
        return SamplingParams(**values)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
