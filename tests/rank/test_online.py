from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.config import SchedulerConfig
from headway.errors import ConfigError
from headway.rank.learner import Learner
from headway.rank.online import Ranker, open_ranker
from headway.rank.train import Sample
from headway.values.params import SamplingParams
from planted import planted

PARAMS = SamplingParams(max_tokens=1000)


@contextmanager
def ranking(ranker: Ranker) -> Iterator[Ranker]:
    try:
        yield ranker
    finally:
        ranker.close()


def teach(ranker: Ranker, samples: list[Sample]) -> None:
    for features, num_output, is_cut in samples:
        ranker.learn(features, num_output, is_cut)
    assert ranker.settle()


def test_it_predicts_nothing_until_it_has_learned_and_then_separates_short_from_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with ranking(Ranker()) as ranker:
        assert ranker.expect([1, 2, 3], "", "", PARAMS) is None
        teach(ranker, planted(random.Random(1), 1000))
        assert ranker.is_predicting
        filler = list(range(2000, 2020))
        short, long = (ranker.expect([word, *filler], "", "", PARAMS) for word in (0, 11))
        assert short is not None
        assert long is not None
        assert 2 * short.median < long.median
        assert short.ceiling < long.ceiling
    assert caplog.text.count("the ranker predicts: tau 0.") == 1


def test_state_is_kept_in_its_file(tmp_path: Path) -> None:
    path, probe = tmp_path / "ranker.npz", planted(random.Random(2), 20)
    with ranking(Ranker(path=path)) as ranker:
        teach(ranker, planted(random.Random(1), 600))
    said = [ranker.expect_of(sample.features) for sample in probe]
    assert None not in said
    with ranking(Ranker(path=path)) as again:
        assert [again.expect_of(sample.features) for sample in probe] == said


def test_nothing_learned_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ranker.npz"
    Ranker(path=path).close()
    assert not path.exists()


def test_state_that_cannot_be_written_is_a_warning_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file" / "ranker.npz"
    with ranking(Ranker(path=path)) as ranker:
        teach(ranker, planted(random.Random(1), 200))
        (tmp_path / "file").write_text("in the way")
    assert "could not be written" in caplog.text


class Stuck(Learner):
    """Learns nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def add(self, sample: Sample) -> bool:
        self.go.wait()
        return super().add(sample)


def test_learning_never_blocks_the_caller_and_drops_are_counted() -> None:
    learner = Stuck()
    with ranking(Ranker(learner, backlog=10)) as ranker:
        for sample in planted(random.Random(1), 100):
            ranker.learn(*sample)  # would hang here
        assert 89 <= ranker.num_dropped <= 90
        learner.go.set()
        assert ranker.settle()


class Broken(Learner):
    def add(self, sample: Sample) -> bool:
        raise RuntimeError("a bug")


def test_a_failing_learner_stops_predictions_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with ranking(Ranker(Broken())) as ranker:
        teach(ranker, planted(random.Random(1), 10))
        assert ranker.expect([1], "", "", PARAMS) is None
    assert caplog.text.count("the ranker failed") == 1


def test_an_empty_answer_teaches_nothing() -> None:
    with ranking(Ranker(Broken())) as ranker:
        ranker.learn(planted(random.Random(1), 1)[0].features, 0, True)
        assert ranker.settle()
        assert not ranker._is_broken


def test_only_a_policy_that_learns_gets_a_ranker(tmp_path: Path) -> None:
    assert open_ranker(SchedulerConfig(policy="sjf")) is None
    ranker = open_ranker(SchedulerConfig(policy="ltr", rank_state=str(tmp_path / "new.npz")))
    assert ranker is not None
    ranker.close()
    (tmp_path / "bad.npz").write_text("bad")
    with pytest.raises(ConfigError, match="is not a ranker's state"):
        open_ranker(SchedulerConfig(policy="ltr", rank_state=str(tmp_path / "bad.npz")))
