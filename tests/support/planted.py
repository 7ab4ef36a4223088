"""Requests whose prompts carry words that predict the length of the answer, among many that do not."""

from __future__ import annotations

import random
from collections.abc import Mapping

from headway.rank.features import extract
from headway.rank.train import Sample
from headway.values.params import SamplingParams

WORDS: Mapping[int, float] = {word: 10 * 1.35**word for word in range(12)}
TURNED: Mapping[int, float] = {word: WORDS[11 - word] for word in WORDS}
MOST = 1000


def planted(rng: random.Random, count: int, words: Mapping[int, float] = WORDS, shuffled: bool = False) -> list[Sample]:
    """Prompts of 10 to 60 tokens, one of them a word; lengths within a factor of about two of what it says."""
    prompts, lengths = [], []
    for _ in range(count):
        tokens = [rng.randrange(1000, 30_000) for _ in range(rng.randrange(10, 60))]
        word = rng.choice(list(words))
        tokens.insert(rng.randrange(len(tokens)), word)
        prompts.append(tokens)
        lengths.append(max(1, min(MOST, round(words[word] * rng.lognormvariate(0, 0.5)))))
    if shuffled:
        rng.shuffle(lengths)
    params = SamplingParams(max_tokens=MOST)
    return [
        Sample(extract(tokens, "", "", params), length, length == MOST)
        for tokens, length in zip(prompts, lengths, strict=True)
    ]
