"""What the benches ask for: lengths with long tails, random token ids, no early stop. Equal seeds, equal work."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

VOCAB = 49_152
_FIRST_PLAIN_TOKEN = 20  # below are the special tokens of the embedded model


@dataclass(frozen=True, slots=True)
class Work:
    """One request: a prompt and exactly so many tokens of answer."""

    tokens: list[int]
    max_tokens: int


def chat_mix(count: int, seed: int = 0) -> list[Work]:
    """Chat-like: prompts of about 120 tokens (8 to 512), answers of about 100 (8 to 256), both lognormal."""
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        # The order of draws (prompt length, its tokens, answer length) is part of the workload's definition.
        num_prompt = _length(rng, mean=120, low=8, high=512)
        tokens = [rng.randrange(_FIRST_PLAIN_TOKEN, VOCAB) for _ in range(num_prompt)]
        works.append(Work(tokens, _length(rng, mean=100, low=8, high=256)))
    return works


def _length(rng: random.Random, *, mean: float, low: int, high: int) -> int:
    sigma = 1.0
    drawn = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(high, max(low, int(drawn)))
