"""The greedy choice among allowed tokens: what a mask leaves of the logits, by every decoder and any threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.errors import EngineError
from headway.kernels import native
from headway.kernels.library import cpu_level
from headway.kernels.ops import KernelSet
from headway.models.batch import ForwardBatch
from headway.models.native import make_decoder
from headway.models.params import ModelWeights
from headway.models.pick import NONE_ALLOWED, NOT_FINITE, Allowed, best_tokens
from headway.runner.weights import pack_weights
from tiny_models import Driver, kernel_sets, random_tensors, tiny_spec

NAN, INF = float("nan"), float("inf")
VOCAB = 1201
HERE = (1, 2, 3) if cpu_level() != "none" else ()


def allowed_of(lines: np.ndarray, line_of: list[int]) -> Allowed:
    bits = np.packbits(lines, axis=1, bitorder="little")
    return Allowed(np.ascontiguousarray(bits), np.array(line_of, np.int32))


@pytest.mark.parametrize(
    ("line", "allowed", "best"),
    [
        ([0.0, 2.0, 2.0, 1.0], [0, 2, 3], 2),
        ([0.0, 2.0, 2.0, 1.0], [1, 2], 1),
        ([-3.0, -2.0, -9.0, -2.0], [0, 2], 0),
        ([-INF, -5.0, -INF, -INF], [0, 2], NONE_ALLOWED),
        ([1.0, 2.0, 5.0, 3.0], [], NONE_ALLOWED),
        ([1.0, NAN, 5.0, 2.0], [2, 3], NOT_FINITE),
        ([1.0, INF, 5.0, 2.0], [2], NOT_FINITE),
        ([-INF, -INF, -INF, -INF], [1], NOT_FINITE),
    ],
)
def test_the_first_of_the_largest_allowed_logits_wins(line: list[float], allowed: list[int], best: int) -> None:
    lines = np.zeros((2, 4), np.bool_)
    lines[1, allowed] = True
    logits = np.array([[0.0, 1.0, 9.0, 3.0], line], np.float32)
    assert best_tokens(logits, allowed_of(lines, [-1, 1])).tolist() == [2, best]


def wide_step(kernels: KernelSet) -> tuple[Driver, ForwardBatch]:
    """Two tokens of two rows are sampled."""
    spec = tiny_spec(vocab_size=VOCAB, tie_embeddings=False)
    weights = ModelWeights(dict(pack_weights(random_tensors(spec).items(), spec, kernels)), kernels.layout)
    driver = Driver(make_decoder(spec, weights, kernels))  # type: ignore[arg-type]
    batch = driver.batch([(driver.add(range(5, 40)), 35), (driver.add(range(90, 99)), 9)])
    return driver, replace(batch, sample_index=np.array([34, 43]))


@pytest.mark.parametrize("kernels", kernel_sets(), ids=lambda kernels: kernels.name)
def test_a_decoder_picks_among_allowed_tokens_what_its_logits_say(kernels: KernelSet) -> None:
    check(kernels)


@pytest.mark.parametrize("threads", HERE)
def test_threads_change_nothing_about_it(threads: int) -> None:
    kernels = native.load(threads)
    assert kernels is not None
    check(kernels)


def check(kernels: KernelSet) -> None:
    """All densities, single tokens at the ends of bytes and panels, and nothing at all."""
    driver, batch = wide_step(kernels)
    logits = driver.decoder.forward(batch, driver.kv)
    random = np.random.default_rng(3)
    lines = [random.random(VOCAB) < density for density in (0.5, 0.01, 0.001, 1.0, 0.0)]
    for token in (0, 7, 8, 47, 48, 383, 384, 1199, 1200):
        lines.append(np.arange(VOCAB) == token)
    order = np.argsort(-logits[0])
    lines += [~np.isin(np.arange(VOCAB), order[:count]) for count in (1, 2, 50)]  # all but the best
    for first in range(len(lines)):
        for line_of in ([first, -1], [-1, first], [first, (first + 1) % len(lines)]):
            allowed = allowed_of(np.array(lines), line_of)
            wanted = best_tokens(logits, allowed).tolist()
            assert driver.decoder.pick(batch, driver.kv, allowed).tolist() == wanted


@pytest.mark.parametrize("threads", HERE)
def test_a_mask_that_did_not_come_or_has_another_size_is_an_error(threads: int) -> None:
    kernels = native.load(threads)
    assert kernels is not None
    driver, batch = wide_step(kernels)
    one = np.ones((1, VOCAB), np.bool_)
    for lines, line_of, word in (
        (one, [0, 1], "mask"),
        (one, [-2, 0], "mask"),
        (one[:, :-8], [0, 0], "bits"),
        (one, [0], "line_of"),
    ):
        with pytest.raises(EngineError, match=word):
            driver.decoder.pick(batch, driver.kv, allowed_of(lines, line_of))
