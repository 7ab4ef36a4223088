"""What a request asks for: how its tokens are chosen, and what its sender counts on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.errors import RequestError


def _check(ok: bool, param: str, got: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{param} is {got!r}; allowed: {allowed}", param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_RANGES = (
    *(("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)),
    *(("dry_multiplier", 0, 100), ("dry_base", 1, 10), ("xtc_probability", 0, 1), ("xtc_threshold", 0, 0.5)),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The defaults sample from the model's own distribution; temperature 0 is greedy."""

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: off; else what a repeat costs: multiplier * base ** (its length - allowed_length)
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0  # last tokens that are looked at; 0: all
    dry_breakers: Sequence[int] = ()  # tokens at which a repeat ends
    xtc_probability: float = 0.0  # that of the tokens above the threshold only the least likely stays
    xtc_threshold: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    grammar: str = ""  # which tokens may follow each other, as `headway.grammar.source` writes it; empty: any

    def __post_init__(self) -> None:
        _check(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        ok = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        _check(ok, "min_tokens", self.min_tokens, f"0 to max_tokens ({self.max_tokens})")
        _check(_is_real(self.temperature) and 0 <= self.temperature <= 2, "temperature", self.temperature, "0 to 2")
        _check(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _check(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        _check(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        ok = _is_real(self.repetition_penalty) and 1e-6 <= self.repetition_penalty <= 10
        _check(ok, "repetition_penalty", self.repetition_penalty, "0.000001 to 10")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            _check(_is_real(value) and low <= value <= high, name, value, f"{low:g} to {high:g}")
        for name, least in (("dry_allowed_length", 1), ("dry_range", 0)):
            value = getattr(self, name)
            _check(_is_int(value) and least <= value < 2**31, name, value, f"{least} to {2**31 - 1}")
        ok = all(_is_int(token) and token >= 0 for token in self.dry_breakers)
        _check(ok, "dry_breakers", self.dry_breakers, "token ids of 0 or more")
        for token, bias in self.logit_bias.items():
            _check(_is_int(token) and token >= 0, "logit_bias", token, "token ids of 0 or more")
            _check(_is_real(bias) and -100 <= bias <= 100, "logit_bias", bias, "biases from -100 to 100")
        ok = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20)
        _check(ok, "logprobs", self.logprobs, "none, or 0 to 20")
        _check(all(isinstance(s, str) and s for s in self.stops), "stop", self.stop, "strings that are not empty")
        ok = all(_is_int(token) and token >= 0 for token in self.stop_token_ids)
        _check(ok, "stop_token_ids", self.stop_token_ids, "token ids of 0 or more")
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        ok = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64)
        _check(ok, "seed", self.seed, "none, or a 64-bit integer")
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "1 or more")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple, whichever way they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request's sender counts on, in seconds; None: nothing in particular."""

    ttft: float | None = None  # from arrival to the first token
    itl: float | None = None  # mean ITL
    deadline: float | None = None  # from arrival to the last token

    def __post_init__(self) -> None:
        for name in ("ttft", "itl", "deadline"):
            value = getattr(self, name)
            ok = value is None or (_is_real(value) and 0 < value <= 86_400)
            _check(ok, f"slo.{name}", value, "above 0, up to a day")


NO_SLO = Slo()


def choice_seed(seed: int, choice: int) -> int:
    """The seed of each of n answers: the first has the request's own, the others lie far from it and each other."""
    return (seed + choice * 0x9E3779B97F4A7C15) & (2**64 - 1)
