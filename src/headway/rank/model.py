"""The ranker's model: one weight per slot and head, three heads, and a map from scores to tokens.

    rank     orders requests by their answers' lengths; larger is longer
    median   of the logarithm of the length
    ceiling  its nine-tenth quantile, moved by `shift` so that it holds for nine in ten held-out requests

It answers and never learns; `train` makes its weights, `learner` decides whether its predictions are used.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.control.lengths import Expected
from headway.errors import ConfigError
from headway.rank.features import NUM_DENSE, NUM_ONCE, NUM_SLOTS, ONCE, Features
from headway.rank.isotonic import Rising, fit_rising

RANK, MEDIAN, CEILING = range(3)
NUM_HEADS = 3
VERSION = 1
_LONGEST = math.log(1e9)

Weights = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class RankModel:
    """`train` writes the weights; another thread gets a copy of the model, never the model itself."""

    slots: Weights  # [NUM_SLOTS, NUM_HEADS]
    dense: Weights  # [NUM_DENSE, NUM_HEADS]
    rising: Rising  # from a rank score to the logarithm of a length
    shift: float = 0.0

    @classmethod
    def empty(cls) -> RankModel:
        """A model that has learned nothing."""
        nothing = Rising(np.zeros(1), np.zeros(1))
        return cls(np.zeros((NUM_SLOTS, NUM_HEADS), np.float32), np.zeros((NUM_DENSE, NUM_HEADS), np.float32), nothing)

    def copy(self) -> RankModel:
        return RankModel(self.slots.copy(), self.dense.copy(), self.rising, self.shift)

    def scores(self, of: Features) -> Weights:
        """Output of each head: [NUM_HEADS]."""
        values = np.full(len(of.slots), of.scale, np.float32)
        values[:NUM_ONCE] = ONCE
        # A product is several times as fast as a sum over so narrow a table.
        said: Weights = values @ self.slots.take(of.slots, axis=0) + of.dense @ self.dense
        return said

    def expect(self, of: Features) -> Expected:
        """Output tokens; from 1 to what the request allows."""
        said, most = self.scores(of), float(of.max_tokens)
        median = math.exp(min(_LONGEST, float(self.rising.at(float(said[RANK])))))
        ceiling = math.exp(min(_LONGEST, float(said[CEILING]) + self.shift))
        median = min(max(1.0, median), most)
        return Expected(median, min(max(median, ceiling), most))

    def calibrate(self, scores: NDArray[np.float64], lengths: NDArray[np.float64], is_cut: NDArray[np.bool_]) -> None:
        """Fit the map and the shift to requests it has not learned from: scores [n, NUM_HEADS], log lengths [n].

        A cut answer counts with the length that the median head predicts, at least its actual length.
        """
        known = np.where(is_cut, np.maximum(lengths, scores[:, MEDIAN]), lengths)
        self.rising = fit_rising(scores[:, RANK], known)
        self.shift = float(np.quantile(known - scores[:, CEILING], 0.9))


def save(path: Path, model: RankModel, extra: Mapping[str, Any]) -> None:
    """Write one file, whole or not at all. Slots that were never touched are left out."""
    used = np.flatnonzero(model.slots.any(axis=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                version=np.int64(VERSION),
                used=used.astype(np.int32),
                slots=model.slots[used],
                dense=model.dense,
                xs=model.rising.xs,
                ys=model.rising.ys,
                shift=np.float64(model.shift),
                **extra,
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path) -> tuple[RankModel, dict[str, Any]]:
    """The model in a file, and what else was saved with it; ConfigError if it is no such file."""
    try:
        # Opened here: numpy leaves a file that turns out to be broken open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            parts = {name: file[name] for name in file.files}
        version = int(parts.pop("version"))
        if version != VERSION:
            raise ConfigError(
                f"the ranker's state {path} has version {version}; this headway reads {VERSION}: "
                "remove the file or name another, and it learns anew"
            )
        model = RankModel.empty()
        model.slots[parts.pop("used")] = parts.pop("slots")
        model.dense[:] = parts.pop("dense")
        model.rising = Rising(parts.pop("xs"), parts.pop("ys"))
        model.shift = float(parts.pop("shift"))
    except OSError as error:
        raise ConfigError(f"cannot read the ranker's state {path}: {error.strerror or error}") from error
    except (KeyError, ValueError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path} is not a ranker's state ({' '.join(str(error).split())}); remove it or name another file"
        ) from error
    return model, parts
