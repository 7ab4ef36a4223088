"""The ranker as a server uses it: it predicts at once from the current model, and learns on a thread of its own.

`expect` is called before a request is queued, `learn` when one has ended. Neither waits: what the thread cannot keep up
with is dropped and counted. With a file the state is read at the start and written now and then and at the end.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from headway import plugins
from headway.config import SchedulerConfig
from headway.control.lengths import Expected
from headway.rank.features import Features, extract
from headway.rank.learner import Learner
from headway.rank.model import RankModel, load, save
from headway.rank.train import Sample
from headway.values.params import SamplingParams

log = logging.getLogger(__name__)

_BACKLOG = 4096
_SAVE_EVERY = 1000  # completions
_NICE = 10  # learning gives way to computing


class Ranker:
    """Any thread may call it; the learner belongs to its thread alone, and what it has learned is swapped in whole."""

    def __init__(self, learner: Learner | None = None, path: Path | None = None, backlog: int = _BACKLOG) -> None:
        self._learner = learner or Learner()
        self._path = path
        if path is not None and path.exists():
            model, extra = load(path)
            self._learner.resume(model, float(extra.get("tau", -1.0)))
        self._live: RankModel | None = self._learner.live
        self._queue: queue.Queue[Sample | threading.Event | None] = queue.Queue(backlog)
        self._num_saved = 0
        self._is_broken = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._work, name="headway-rank", daemon=True)
        self._thread.start()

    @property
    def is_predicting(self) -> bool:
        """Whether it predicts now."""
        return self._live is not None

    def features(self, tokens: Sequence[int], tenant: str, route: str, params: SamplingParams) -> Features:
        """The features of a request for `expect_of` and `learn`."""
        return extract(tokens, tenant, route, params)

    def expect(self, tokens: Sequence[int], tenant: str, route: str, params: SamplingParams) -> Expected | None:
        """Predicted output tokens; None: use the averages."""
        return self.expect_of(extract(tokens, tenant, route, params))

    def expect_of(self, features: Features) -> Expected | None:
        """Likewise."""
        live = self._live
        return None if live is None else live.expect(features)

    def learn(self, features: Features, num_output: int, is_cut: bool) -> None:
        """A request has ended; `is_cut` says that its answer would have been longer."""
        if num_output < 1:
            return
        try:
            self._queue.put_nowait(Sample(features, num_output, is_cut))
        except queue.Full:
            self.num_dropped += 1

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until every completion so far is processed; false if that took too long."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Learn what is left, save, end the thread; idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        _give_way()
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif not self._is_broken:
                self._take(item)
        if not self._is_broken:
            self._save()

    def _take(self, sample: Sample) -> None:
        try:
            if self._learner.add(sample):
                self._publish()
                if self._learner.num_seen - self._num_saved >= _SAVE_EVERY:
                    self._save()
        except Exception:
            # The engine goes on: without a ranker, requests are ordered by averages.
            log.exception("the ranker failed and predicts nothing from now on")
            self._is_broken, self._live = True, None

    def _publish(self) -> None:
        """Publish the model to `expect`; log when predictions start or stop."""
        learner, was_predicting = self._learner, self.is_predicting
        self._live = learner.live
        if self.is_predicting != was_predicting:
            change = "predicts" if self.is_predicting else "stops predicting"
            taus = (float(learner.new), float(learner.frozen), float(learner.plain))
            log.info(
                "after %d answers the ranker %s: tau %.2f, frozen %.2f, averages %.2f", learner.num_seen, change, *taus
            )

    def _save(self) -> None:
        seen = self._learner.num_seen
        if self._path is None or seen == self._num_saved:
            return
        try:
            save(self._path, *self._learner.state())
        except OSError as error:
            log.warning("the ranker's state could not be written to %s: %s", self._path, error)
        self._num_saved = seen


def _give_way() -> None:
    """Lower this thread's priority where the system supports that."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except (AttributeError, OSError):
        log.debug("the ranker's thread keeps its priority")


def open_ranker(wanted: SchedulerConfig) -> Ranker | None:
    """The ranker that this policy needs; None if it needs none."""
    if not getattr(plugins.load("policies", wanted.policy), "learns", False):
        return None
    return Ranker(path=Path(wanted.rank_state).expanduser() if wanted.rank_state else None)
