"""Learning from a log instead of live traffic: trains on the earlier requests, evaluates on the later ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from headway.errors import ConfigError
from headway.rank.model import RankModel
from headway.rank.train import LIST, Batch, Loss, Sample, Trainer, log_lengths

LEAST = 2 * LIST
_EPOCHS = 12
_UNSEEN = 0.2  # the last part of what it learns from is kept for fitting the map from scores to lengths
_CHUNK = 256


def split(samples: Sequence[Sample], held_out: float) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Training and held-out samples; the held-out ones are the last part of the traffic."""
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out is {held_out:g}; allowed: above 0, below 1")
    at = round(len(samples) * (1 - held_out))
    if at < LEAST or len(samples) - at < 2:
        raise ConfigError(f"the log has {len(samples)} requests; at least {LEAST} to learn from and 2 to judge by")
    return samples[:at], samples[at:]


def fit(samples: Sequence[Sample], *, seed: int = 0, loss: Loss = Loss.PAIRS) -> RankModel:
    """A model of all samples, in the order of their arrival; equal samples and seeds give equal models."""
    if len(samples) < LEAST:
        raise ConfigError(f"{len(samples)} requests are too few to learn from; at least {LEAST}")
    at = round(len(samples) * (1 - _UNSEEN))
    trainer, rng, order = Trainer(RankModel.empty(), loss), random.Random(seed), list(samples[:at])
    for _ in range(_EPOCHS):
        rng.shuffle(order)
        for start in range(0, len(order) - LIST + 1, LIST):
            trainer.learn(order[start : start + LIST])
    unseen = samples[at:]
    cuts = np.array([sample.is_cut for sample in unseen])
    trainer.model.calibrate(scores(trainer.model, unseen), log_lengths(unseen), cuts)
    return trainer.model


def scores(model: RankModel, samples: Sequence[Sample]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Output of each head for each sample: [n, heads]."""
    parts = [samples[start : start + _CHUNK] for start in range(0, len(samples), _CHUNK)]
    return np.concatenate([Batch([sample.features for sample in part]).scores(model) for part in parts])
