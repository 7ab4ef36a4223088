"""Lengths and arrivals. Everything is drawn from the generator it is given: equal seeds, equal jobs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

from headway.bench.virtual import EngineSetup, Job, simulate
from headway.values.params import Slo

# Quantiles of a public hour of conversations with a hosted model (Azure, 2023): prompt and answer tokens.
_PROMPTS = ((0.0, 16), (0.5, 1020), (0.9, 2735), (0.99, 4142), (1.0, 14050))
_ANSWERS = ((0.0, 8), (0.5, 129), (0.9, 424), (0.99, 601), (1.0, 1000))

INTERACTIVE, BATCH = Slo(ttft=2.0, itl=0.2), Slo(ttft=30.0, itl=0.2)


def between(quantiles: Sequence[tuple[float, float]], u: float) -> int:
    """The value at `u`, on straight lines between the logarithms of the quantiles."""
    for (low, below), (high, above) in pairwise(quantiles):
        if u <= high:
            share = (u - low) / (high - low)
            return round(math.exp(math.log(below) * (1 - share) + math.log(above) * share))
    return round(quantiles[-1][1])


def conversation(rng: random.Random) -> tuple[int, int]:
    """Prompt and answer tokens; the two are independent, as in the trace."""
    return between(_PROMPTS, rng.random()), between(_ANSWERS, rng.random())


def poisson(rng: random.Random, rate: float, seconds: float) -> list[float]:
    times, now = [], rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def gamma(rng: random.Random, rate: float, seconds: float, spread: float) -> list[float]:
    """Arrivals with a coefficient of variation of `spread` between arrivals, as many as the rate says.

    Stretched to end at `seconds`: in ten minutes a spread of 13 would leave the load to chance.
    """
    shape = spread**-2
    intervals = [rng.gammavariate(shape, 1.0) for _ in range(round(rate * seconds))]
    scale = seconds / sum(intervals)
    return list(accumulate(interval * scale for interval in intervals))


def capacity(jobs: Sequence[Job], setup: EngineSetup) -> float:
    """Requests per second that this engine can serve of such jobs: how fast it clears all of them at once."""
    burst = [Job(0.0, job.num_prompt, job.num_output, job.max_tokens) for job in jobs]
    return len(burst) / simulate(burst, setup).makespan


def noisy(rng: random.Random, length: int, sigma: float) -> float:
    """The output of a predictor with this much error in the logarithm."""
    return length * math.exp(rng.gauss(0.0, sigma))


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
