"""Requests of all kinds whose answers show whether one engine went on exactly where another one stopped."""

from __future__ import annotations

import random

from headway.engine.client import Submit
from headway.values.params import SamplingParams


def submits(start: int = 1) -> list[Submit]:
    """All kinds of requests: their tokens depend on seeds, penalties, limits and stop tokens."""
    rng = random.Random(5)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.7, "presence_penalty": 0.9, "frequency_penalty": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.8, "min_tokens": 9, "ignore_eos": False},
        {"temperature": 0.8, "stop_token_ids": tuple(range(1, 60))},
        {"temperature": 0.0, "max_tokens": 2},
        {"temperature": 0.8, "dry_multiplier": 1.5, "dry_allowed_length": 1, "xtc_probability": 0.5},
    ]
    made = []
    for at, kind in enumerate(kinds * 2):
        prompt = [rng.randrange(1, 200) for _ in range(rng.choice([1, 5, 15, 16, 17, 47, 48, 130]))]
        params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **kind})  # type: ignore[arg-type]
        made.append(Submit(start + at, prompt, params, seed=at))
    return made
