"""The greedy choice: what `pick` of every decoder means, in one place, for those that have logits to choose from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_tokens(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """For each line of [S, vocab] the lowest id of its largest logit; -1 where a NaN is or the largest is infinite."""
    best: NDArray[np.int64] = logits.argmax(axis=1)  # of equals the first; a NaN wins over everything
    best[~np.isfinite(logits[np.arange(len(best)), best])] = -1
    return best
