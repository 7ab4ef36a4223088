from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.rank.features import extract
from headway.rank.isotonic import fit_rising, pool
from headway.rank.learner import judge_model
from headway.rank.model import CEILING, MEDIAN, RANK, RankModel, load, save
from headway.rank.offline import fit
from headway.rank.train import LIST, Loss, Sample, Trainer, _list_pull, _pair_pull, _quantile_pull
from headway.values.params import SamplingParams
from planted import planted


@pytest.mark.parametrize("loss", Loss)
def test_planted_words_are_learned_from_a_log(loss: Loss) -> None:
    rng = random.Random(5)
    model = fit(planted(rng, 1000), loss=loss)
    assert judge_model(model, planted(rng, 500)) >= 0.45


def test_quantiles_hold_on_later_requests() -> None:
    rng = random.Random(6)
    model, later = fit(planted(rng, 2000)), planted(rng, 1000)
    expected = [model.expect(sample.features) for sample in later]
    above = sum(sample.num_output > each.median for sample, each in zip(later, expected, strict=True)) / len(later)
    held = sum(sample.num_output <= each.ceiling for sample, each in zip(later, expected, strict=True)) / len(later)
    assert 0.4 <= above <= 0.6
    assert 0.86 <= held <= 0.94


def test_equal_seeds_give_equal_models() -> None:
    samples = planted(random.Random(7), 300)
    first, second, other = (fit(samples, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.slots, second.slots)
    assert np.array_equal(first.rising.ys, second.rising.ys)
    assert not np.array_equal(first.slots, other.slots)


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="127 requests are too few to learn from; at least 128"):
        fit(planted(random.Random(0), 127))


@pytest.mark.parametrize("pull", [_list_pull, _pair_pull])
def test_rank_pull_is_the_slope_of_its_loss(pull: object) -> None:
    rng = np.random.default_rng(3)
    scores, lengths = rng.normal(size=20), np.log(rng.integers(1, 9, size=20).astype(float))
    is_cut = rng.random(20) < 0.3

    def list_loss(s: np.ndarray) -> float:
        total = 0.0
        for i in np.flatnonzero(~is_cut):
            total += np.log(np.exp(-s[lengths >= lengths[i]]).sum()) + s[i]
        return float(total)

    def pair_loss(s: np.ndarray) -> float:
        pairs = [(i, j) for i in range(20) for j in range(20) if lengths[i] < lengths[j] and not is_cut[i]]
        return sum(float(np.log1p(np.exp(s[i] - s[j]))) for i, j in pairs) * 2 / 20

    loss = list_loss if pull is _list_pull else pair_loss
    found = pull(scores, lengths, is_cut)  # type: ignore[operator]
    for i in range(20):
        step = np.zeros(20)
        step[i] = 1e-5
        assert found[i] == pytest.approx((loss(scores + step) - loss(scores - step)) / 2e-5, abs=1e-6)


def test_a_cut_answer_only_ever_means_longer() -> None:
    lengths, cut, whole = np.log([10.0, 20.0]), np.array([True, False]), np.array([False, False])
    above, below = np.array([9.0, 9.0]), np.array([0.0, 0.0])
    assert _quantile_pull(above, lengths, cut, 0.5).tolist() == [0.0, 0.5]
    assert _quantile_pull(below, lengths, cut, 0.5).tolist() == _quantile_pull(below, lengths, whole, 0.5).tolist()
    # Cut at 10 it may be longer than 20 or not: no order is known. Ended at 10 it is the shorter one.
    assert _pair_pull(below, lengths, cut).tolist() == [0.0, 0.0]
    assert _pair_pull(below, lengths, whole)[0] > 0
    # The one cut early is no evidence of being short, as the same one ended there would be.
    assert _list_pull(below, lengths, cut)[0] <= 0 < _list_pull(below, lengths, whole)[0]


def test_censoring_unlearns_a_bias() -> None:
    """Half of all answers are cut at 20, whatever they would have become; taken at their word they would mislead."""
    rng, params = random.Random(1), SamplingParams(max_tokens=400)
    samples = []
    for _ in range(3000):
        is_long = rng.random() < 0.5
        length = round((200 if is_long else 40) * rng.lognormvariate(0, 0.2))
        is_cut = is_long and rng.random() < 0.8
        features = extract([1 if is_long else 2, rng.randrange(10, 99)], "", "", params)
        samples.append(Sample(features, 20 if is_cut else length, is_cut))
    model = fit(samples)
    long, short = (model.scores(extract([word, 50], "", "", params)) for word in (1, 2))
    assert long[RANK] > short[RANK]
    assert long[MEDIAN] > short[MEDIAN] + 0.5


def test_first_list_sets_the_heads_where_answers_are() -> None:
    trainer = Trainer(RankModel.empty())
    samples = planted(random.Random(2), LIST)
    trainer.learn(samples)
    said = trainer.model.scores(samples[0].features)
    assert 2.0 < said[MEDIAN] < said[CEILING] < 8.0


def test_pooling_gives_the_nearest_rising_sequence() -> None:
    pooled = pool(np.array([1.0, 3.0, 2.0, 2.0, 5.0, 4.0]), np.array([1.0, 1.0, 1.0, 2.0, 1.0, 3.0]))
    assert pooled.tolist() == pytest.approx([1.0, 2.25, 2.25, 2.25, 4.25, 4.25])
    rng = np.random.default_rng(0)
    scores = rng.random(3000)
    rising = fit_rising(scores, scores**2 + rng.normal(scale=0.3, size=3000))
    assert (np.diff(rising.ys) >= 0).all()
    assert np.abs(rising.at(scores) - scores**2).mean() < 0.06


def test_a_saved_model_predicts_the_same(tmp_path: Path) -> None:
    rng = random.Random(4)
    model, path = fit(planted(rng, 300)), tmp_path / "new" / "ranker.npz"
    save(path, model, {"tau": 0.25})
    again, extra = load(path)
    assert float(extra["tau"]) == 0.25
    for sample in planted(rng, 50):
        assert again.expect(sample.features) == model.expect(sample.features)
    assert [file.name for file in path.parent.iterdir()] == ["ranker.npz"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_state_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"state\.npz is not a ranker's state .*remove it or name another file"):
        load(path)


def test_a_state_of_another_version_or_without_parts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    np.savez(path, version=np.int64(99))
    with pytest.raises(ConfigError, match="has version 99; this headway reads 1"):
        load(path)
    np.savez(path, version=np.int64(1))
    with pytest.raises(ConfigError, match="is not a ranker's state"):
        load(path)
    with pytest.raises(ConfigError, match="cannot read the ranker's state"):
        load(tmp_path / "none.npz")
