"""Learning the model's weights from answers that have ended, list by list.

The rank head is taught the order of a list, every pair by itself, or with `Loss.LISTS` the whole list at once: the
shortest answer is the likeliest to end first among all that are at least as long, then the next, and so on (ListMLE).
A cut answer is in every such choice up to its length and is never itself chosen: it is known only that it would have
been longer. That is Cox's partial likelihood with right-censored samples.

The other heads are taught quantiles of the log length; a cut answer only ever pulls them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.rank.features import NUM_ONCE, ONCE, Features
from headway.rank.model import CEILING, MEDIAN, NUM_HEADS, RANK, RankModel, Weights

LIST = 64
_QUANTILES = ((MEDIAN, 0.5), (CEILING, 0.9))
_RATE = np.float32(1.0)
_START = 4.0  # squared gradient that every weight is taken to have seen: rare words move little at once
_SOFT = 0.2  # within so much of its quantile, in the logarithm, a head is pulled less

Doubles = NDArray[np.float64]


class Loss(Enum):
    """How the rank head is taught."""

    LISTS = "list"
    PAIRS = "pair"


class Sample(NamedTuple):
    """A request and how it ended."""

    features: Features
    num_output: int
    is_cut: bool  # it would have been longer


class Batch:
    """A batch of requests: their slots in one array, with the request of each."""

    def __init__(self, items: Sequence[Features]) -> None:
        sizes = np.array([len(item.slots) for item in items])
        self.slots = np.concatenate([item.slots for item in items])
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.rows = np.repeat(np.arange(len(items)), sizes)
        self.values = np.repeat(np.array([item.scale for item in items], np.float32), sizes)
        once = self.starts[:, None] + np.arange(NUM_ONCE)
        self.values[once.ravel()] = ONCE
        self.dense = np.stack([item.dense for item in items])

    def scores(self, model: RankModel) -> Doubles:
        """Output of each head for each request: [n, NUM_HEADS]."""
        found = model.slots.take(self.slots, axis=0) * self.values[:, None]
        return np.asarray(np.add.reduceat(found, self.starts, axis=0) + self.dense @ model.dense, np.float64)


class Trainer:
    """Writes one model's weights; each has a step size of its own, which falls as it is used (Adagrad)."""

    def __init__(self, model: RankModel, loss: Loss = Loss.PAIRS) -> None:
        self.model = model
        self.num_lists = 0
        self._loss = _list_pull if loss is Loss.LISTS else _pair_pull
        self._seen = np.full_like(model.slots, _START)
        self._seen_dense = np.full_like(model.dense, _START)
        self._pull = np.zeros_like(model.slots)
        self._is_used = np.zeros(len(model.slots), np.bool_)

    def learn(self, samples: Sequence[Sample]) -> None:
        """One step on one list."""
        batch = Batch([sample.features for sample in samples])
        lengths = log_lengths(samples)
        is_cut = np.array([sample.is_cut for sample in samples])
        if not self.num_lists and not self.model.dense.any():
            # Starting at the quantiles of the first list saves the heads many steps.
            self.model.dense[0, MEDIAN], self.model.dense[0, CEILING] = np.quantile(lengths, (0.5, 0.9))
        self.num_lists += 1
        said = batch.scores(self.model)
        pull = np.empty((len(samples), NUM_HEADS), np.float32)
        pull[:, RANK] = self._loss(said[:, RANK], lengths, is_cut)
        for head, q in _QUANTILES:
            pull[:, head] = _quantile_pull(said[:, head], lengths, is_cut, q)
        self._step(batch, pull)

    def forget(self, share: float) -> None:
        """Let weights that have settled move again."""
        self._seen *= 1.0 - share
        self._seen_dense *= 1.0 - share
        np.maximum(self._seen, _START, out=self._seen)
        np.maximum(self._seen_dense, _START, out=self._seen_dense)

    def _step(self, batch: Batch, pull: Weights) -> None:
        each = pull[batch.rows] * batch.values[:, None]
        for head in range(NUM_HEADS):
            np.add.at(self._pull[:, head], batch.slots, each[:, head])
        # Many slots occur in a batch more than once; a mark per slot finds each one faster than sorting would.
        self._is_used[batch.slots] = True
        used = np.flatnonzero(self._is_used)
        self._is_used[used] = False
        pulled = self._pull.take(used, axis=0)
        self._pull[used] = 0.0
        seen = self._seen.take(used, axis=0) + pulled * pulled
        self._seen[used] = seen
        self.model.slots[used] = self.model.slots.take(used, axis=0) - _RATE * pulled / np.sqrt(seen)
        dense = batch.dense.T @ pull
        self._seen_dense += dense * dense
        self.model.dense -= _RATE * dense / np.sqrt(self._seen_dense)


def log_lengths(samples: Iterable[Sample]) -> Doubles:
    return np.log(np.array([max(1, sample.num_output) for sample in samples], np.float64))


def _list_pull(scores: Doubles, lengths: Doubles, is_cut: NDArray[np.bool_]) -> Doubles:
    """Gradient of the negative log likelihood of the order in which answers ended; larger scores end later."""
    order = np.argsort(lengths, kind="stable")
    ends = lengths[order]
    chance = np.exp(np.clip(scores.min() - scores[order], -30.0, 0.0))
    left = np.cumsum(chance[::-1])[::-1]  # chance of all at or after a place
    first = np.searchsorted(ends, ends, side="left")  # equal lengths: the first of them
    last = np.searchsorted(ends, ends, side="right") - 1
    is_end = ~is_cut[order]
    hazard = np.cumsum(np.where(is_end, 1.0 / left[first], 0.0))[last]
    pull = np.empty_like(scores)
    pull[order] = is_end - chance * hazard
    return pull


def _pair_pull(scores: Doubles, lengths: Doubles, is_cut: NDArray[np.bool_]) -> Doubles:
    """Gradient of the mean logistic loss over pairs of which the shorter is known to be so."""
    shorter = (lengths[:, None] < lengths[None, :]) & ~is_cut[:, None]
    wrong = shorter / (1.0 + np.exp(np.clip(scores[None, :] - scores[:, None], -30.0, 30.0)))
    return np.asarray((wrong.sum(axis=1) - wrong.sum(axis=0)) * 2.0 / len(scores))


def _quantile_pull(scores: Doubles, lengths: Doubles, is_cut: NDArray[np.bool_], q: float) -> Doubles:
    """Gradient of the pinball loss, rounded off at its corner."""
    over = np.clip((scores - lengths) / _SOFT, -1.0, 1.0)
    pull = np.where(over > 0, (1.0 - q) * over, q * over)
    return np.where(is_cut & (over > 0), 0.0, pull)
