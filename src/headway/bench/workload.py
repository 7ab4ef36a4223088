"""What the benches ask for: prompts of random token ids and exactly so many tokens of answer. Equal seeds, equal work.

chat-mix   lengths with long tails: prompts of about 120 tokens (8 to 512), answers of about 100 (8 to 256)
bimodal    30 in; one request in ten wants 400 tokens, the others 10, in random order
uniform    30 in; answers of 10 to 90 tokens, equally likely: as many tokens as bimodal, no tail
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError

VOCAB = 49_152
_FIRST_PLAIN_TOKEN = 20  # below are the special tokens of the embedded model
_SHORT_PROMPT = 30


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: a prompt and exactly so many tokens of answer."""

    tokens: list[int]
    max_tokens: int


def chat_mix(count: int, seed: int = 0) -> list[WorkItem]:
    """Chat-like: prompts of about 120 tokens (8 to 512), answers of about 100 (8 to 256), both lognormal."""
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        # The order of draws (prompt length, its tokens, answer length) is part of the workload's definition.
        num_prompt = _length(rng, mean=120, low=8, high=512)
        tokens = _tokens(rng, num_prompt)
        works.append(WorkItem(tokens, _length(rng, mean=100, low=8, high=256)))
    return works


def bimodal(count: int, seed: int = 0) -> list[WorkItem]:
    """30 in, and exactly a tenth (rounded) wants 400 tokens, all others 10; which ones is shuffled."""
    rng = random.Random(seed)
    num_long = round(count / 10)
    answers = [400] * num_long + [10] * (count - num_long)
    rng.shuffle(answers)
    return [WorkItem(_tokens(rng, _SHORT_PROMPT), answer) for answer in answers]


def uniform(count: int, seed: int = 0) -> list[WorkItem]:
    """30 in, 10 to 90 out."""
    rng = random.Random(seed)
    return [WorkItem(_tokens(rng, _SHORT_PROMPT), rng.randint(10, 90)) for _ in range(count)]


def read_workload(path: Path, count: int) -> list[WorkItem]:
    """The first requests of a file of JSON lines, each with `tokens` and `max_tokens`."""
    lines = path.read_text().splitlines()[:count]
    return [WorkItem(entry["tokens"], entry["max_tokens"]) for entry in map(json.loads, lines)]


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A named workload and what it is usually run with."""

    make: Callable[[int, int], list[WorkItem]]
    requests: int
    slots: int  # at most; never more than requests


KINDS: Mapping[str, WorkloadKind] = {
    "chat-mix": WorkloadKind(chat_mix, requests=32, slots=256),
    "bimodal": WorkloadKind(bimodal, requests=160, slots=32),
    "uniform": WorkloadKind(uniform, requests=160, slots=32),
}


def named(name: str) -> WorkloadKind:
    if name not in KINDS:
        raise ConfigError(f"workload is {name!r}; allowed: {', '.join(KINDS)}")
    return KINDS[name]


def fit(works: Sequence[WorkItem], vocab_size: int, max_len: int) -> list[WorkItem]:
    """The same lengths for a model with a smaller vocabulary; refuses a model whose context is too short."""
    longest = max(len(work.tokens) + work.max_tokens for work in works)
    if longest > max_len:
        raise ConfigError(
            f"this workload has a request of {longest} tokens; the model's context is {max_len}: "
            "choose another workload or model, or raise max_model_len"
        )
    return [WorkItem([token % vocab_size for token in work.tokens], work.max_tokens) for work in works]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_PLAIN_TOKEN, VOCAB) for _ in range(count)]


def _length(rng: random.Random, *, mean: float, low: int, high: int) -> int:
    sigma = 1.0
    drawn = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(high, max(low, int(drawn)))
