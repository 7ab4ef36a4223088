"""When the ranker learns, and whether its predictions are used.

Completions gather into a batch. No model has learned from it yet, so it first serves as a test set: Kendall's tau of
the predictions of the new model, the frozen model and the plain averages (T0). Then the new model learns from it.

    batch ─▶ score new, frozen, T0 ─▶ learn four fifths, with older ones from the reservoir ─▶ calibrate ─▶ choose

The best of the three is used. If that is T0, or none reaches `FLOOR`, the ranker predicts nothing and the engine's own
averages are used. The frozen model is a copy of the new one from when it was last the better of the two. A tau of
the new model below `_WRONG` means that requests have changed: it is discarded and starts empty.

One thread at a time; no clock, no files.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

from headway.control.lengths import Lengths
from headway.rank.model import RANK, RankModel
from headway.rank.tau import kendall_tau
from headway.rank.train import LIST, Batch, Doubles, Loss, Sample, Trainer, log_lengths

FLOOR = 0.15
CAPACITY = 20_000
CHECK_EVERY = 1000
_WRONG = -0.1  # a batch with such a tau means that requests have changed
_APART = 512  # requests that are not learned from: the map from scores to lengths is fitted to them
_APART_EVERY = 5  # one in so many is set apart
_LISTS = 24  # steps per batch, half of them on what came last
_FORGET = 0.1  # of the step sizes' memory, per check


class Judged:
    """A running tau; the newest batch counts half."""

    __slots__ = ("value",)

    def __init__(self, value: float | None = None) -> None:
        self.value = value

    def add(self, tau: float) -> None:
        self.value = tau if self.value is None else 0.5 * (self.value + tau)

    def __float__(self) -> float:
        return -1.0 if self.value is None else self.value


class Learner:
    """`live` is the model to predict with now; None: predict nothing. It is never written to after it was set."""

    def __init__(
        self, *, seed: int = 0, check_every: int = CHECK_EVERY, capacity: int = CAPACITY, loss: Loss = Loss.PAIRS
    ) -> None:
        self.live: RankModel | None = None
        self.num_seen = 0
        self.new, self.frozen, self.plain = Judged(), Judged(), Judged()
        self.trainer = Trainer(RankModel.empty(), loss)
        self.frozen_model: RankModel | None = None
        self._loss = loss
        self._check_every = check_every
        self._capacity = capacity
        self._rng = random.Random(seed)
        self._averages = Lengths()
        self._fresh: list[Sample] = []
        self._plain_said: list[float] = []
        self._reservoir: list[Sample] = []
        self._latest: deque[Sample] = deque(maxlen=check_every)
        self._apart: deque[Sample] = deque(maxlen=_APART)

    @property
    def tau(self) -> float:
        """Of the model in use, on requests it had not learned from."""
        return max(float(self.new), float(self.frozen), float(self.plain))

    @property
    def batch_size(self) -> int:
        """Small at first, so that the first predictions come soon; then a quarter of a check."""
        quarter = max(LIST, self._check_every // 4)
        return quarter if self.num_seen >= quarter else max(LIST, quarter // 2)

    def resume(self, model: RankModel, tau: float) -> None:
        """Go on from a model that was saved when it had this tau."""
        self.trainer = Trainer(model, self._loss)
        self.frozen_model = model.copy()
        self.new, self.frozen = Judged(tau), Judged(tau)
        self.live = self.frozen_model if tau >= FLOOR else None

    def state(self) -> tuple[RankModel, dict[str, float]]:
        """The better of its models and what to know about it, for a file."""
        is_new = self.frozen_model is None or float(self.new) >= float(self.frozen)
        model = self.trainer.model if is_new else self.frozen_model
        assert model is not None
        return model, {"tau": float(self.new if is_new else self.frozen)}

    def add(self, sample: Sample) -> bool:
        """Take one completion; true if that made a batch, which was learned from."""
        of = sample.features
        self._plain_said.append(self._averages.expect(of.tenant, of.route, of.max_tokens).median)
        self._averages.learn(of.tenant, of.route, sample.num_output, sample.is_cut)
        self._fresh.append(sample)
        if len(self._fresh) < self.batch_size:
            return False
        fresh, plain_said = self._fresh, self._plain_said
        self._fresh, self._plain_said = [], []
        before = self.num_seen
        self.num_seen += len(fresh)
        self._judge(fresh, plain_said)
        self._keep(fresh)
        self._study()
        self._calibrate()
        if before // self._check_every != self.num_seen // self._check_every:
            self._freeze()
        self._choose()
        return True

    def _judge(self, fresh: Sequence[Sample], plain_said: Sequence[float]) -> None:
        batch = Batch([sample.features for sample in fresh])
        self.plain.add(tau_of(fresh, np.log(np.maximum(1.0, plain_said))))
        if self.trainer.num_lists or self.frozen_model is not None:
            said = batch.scores(self.trainer.model)
            tau = tau_of(fresh, self.trainer.model.rising.at(said[:, RANK]))
            if tau < _WRONG:
                self._start_again()
            else:
                self.new.add(tau)
        if self.frozen_model is not None:
            said = batch.scores(self.frozen_model)
            self.frozen.add(tau_of(fresh, self.frozen_model.rising.at(said[:, RANK])))

    def _start_again(self) -> None:
        """Requests have changed: discard the model and the samples it learned from."""
        self.trainer = Trainer(RankModel.empty(), self._loss)
        self.new = Judged()
        self._reservoir, self._latest, self._apart = [], deque(maxlen=self._check_every), deque(maxlen=_APART)

    def _keep(self, fresh: Sequence[Sample]) -> None:
        """New samples always enter; once it is full each replaces a random one, so old samples fade out."""
        self._apart.extend(fresh[::_APART_EVERY])
        learned = [sample for place, sample in enumerate(fresh) if place % _APART_EVERY]
        self._latest.extend(learned)
        for sample in learned:
            if len(self._reservoir) < self._capacity:
                self._reservoir.append(sample)
            else:
                self._reservoir[self._rng.randrange(self._capacity)] = sample

    def _study(self) -> None:
        latest = list(self._latest)
        for turn in range(_LISTS):
            source = latest if turn % 2 else self._reservoir
            self.trainer.learn(self._rng.sample(source, min(LIST, len(source))))

    def _calibrate(self) -> None:
        """Calibrate on the current scores of requests it never learned from: scores change while it learns."""
        said = Batch([sample.features for sample in self._apart]).scores(self.trainer.model)
        cuts = np.array([sample.is_cut for sample in self._apart])
        self.trainer.model.calibrate(said, log_lengths(self._apart), cuts)

    def _freeze(self) -> None:
        if self.new.value is not None and float(self.new) >= float(self.frozen):
            self.frozen_model = self.trainer.model.copy()
            self.frozen = Judged(self.new.value)
        self.trainer.forget(_FORGET)

    def _choose(self) -> None:
        best = self.tau
        if best < FLOOR or best == float(self.plain):
            self.live = None
        elif float(self.new) >= float(self.frozen):
            self.live = self.trainer.model.copy()
        else:
            self.live = self.frozen_model


def tau_of(samples: Sequence[Sample], said: Doubles) -> float:
    """Tau of predicted log lengths against actual ones. A prediction is cut at `max_tokens`, where the answer ends.

    Aborted answers are left out: their length is not predictable.
    """
    limits = np.log(np.array([sample.features.max_tokens for sample in samples], np.float64))
    capped = np.minimum(said, limits).tolist()
    pairs = [
        (guess, float(sample.num_output))
        for guess, sample in zip(capped, samples, strict=True)
        if not sample.is_cut or sample.num_output >= sample.features.max_tokens
    ]
    return kendall_tau([guess for guess, _ in pairs], [length for _, length in pairs])


def judge_model(model: RankModel, samples: Sequence[Sample]) -> float:
    """A model's tau on samples it has not learned from."""
    said = Batch([sample.features for sample in samples]).scores(model)
    return tau_of(samples, model.rising.at(said[:, RANK]))
