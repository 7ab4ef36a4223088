"""An isotonic map from scores to lengths: the cost of a request is in tokens, a rank is only an order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PER_STEP = 12  # points of which one mean is taken
_LEAST_STEPS, _MOST_STEPS = 8, 64

Floats = NDArray[np.float64]


class Rising(NamedTuple):
    """Piecewise linear between points, constant beyond them; without points it predicts nothing."""

    xs: Floats
    ys: Floats

    def at(self, x: float | Floats) -> Floats:
        return np.asarray(np.interp(x, self.xs, self.ys))


def pool(values: Floats, weights: Floats) -> Floats:
    """The nearest rising sequence, by weighted squares: neighbours in the wrong order are pooled (PAV)."""
    blocks: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, mass, count = blocks.pop()
            before = blocks[-1]
            before[0] = (before[0] * before[1] + mean * mass) / (before[1] + mass)
            before[1] += mass
            before[2] += count
    return np.repeat([block[0] for block in blocks], [int(block[2]) for block in blocks])


def fit_rising(scores: Floats, values: Floats) -> Rising:
    """Means of the values over steps of the scores, pooled until they rise.

    The mean of log lengths is close to their median where they are symmetric. Where most answers are short and some
    very long, only the mean differs between a step with many long answers and one with few.
    """
    order = np.argsort(scores, kind="stable")
    num_steps = max(min(_LEAST_STEPS, len(scores)), min(_MOST_STEPS, len(scores) // _PER_STEP))
    parts = np.array_split(order, num_steps)
    xs = np.array([np.mean(scores[part]) for part in parts])
    ys = np.array([np.mean(values[part]) for part in parts])
    return Rising(xs, pool(ys, np.array([float(len(part)) for part in parts])))
