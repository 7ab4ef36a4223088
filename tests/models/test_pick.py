"""The greedy choice: ties, and logits that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest

from headway.kernels.ops import KernelSet
from headway.models.pick import best_tokens
from tiny_models import Driver, kernel_sets, tiny_decoder, tiny_spec

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("line", "best"),
    [
        ([0.0, 2.0, 2.0, 1.0], 1),
        ([-3.0, -2.0, -9.0, -2.0], 1),
        ([0.0, -0.0, 0.0, -0.0], 0),
        ([-INF, -5.0, -INF, -INF], 1),
        ([1.0, NAN, 5.0, 2.0], -1),
        ([1.0, 2.0, 5.0, NAN], -1),
        ([1.0, INF, NAN, 2.0], -1),
        ([1.0, INF, 5.0, 2.0], -1),
        ([-INF, -INF, -INF, -INF], -1),
    ],
)
def test_the_lowest_id_of_the_largest_logit_wins_unless_it_is_no_number(line: list[float], best: int) -> None:
    others = [[0.0, 1.0, 9.0, 3.0], [4.0, 1.0, 1.0, 3.0]]
    assert best_tokens(np.array([others[0], line, others[1]], np.float32)).tolist() == [2, best, 0]


def test_no_line_is_no_choice() -> None:
    assert best_tokens(np.zeros((0, 5), np.float32)).tolist() == []


@pytest.mark.parametrize("kernels", kernel_sets(), ids=lambda kernels: kernels.name)
def test_a_decoder_picks_what_its_logits_say_and_writes_the_same_cells(kernels: KernelSet) -> None:
    decoder = tiny_decoder(tiny_spec(), kernels)
    driver = Driver(decoder)
    batch = driver.batch([(driver.add(range(5, 40)), 35), (driver.add(range(90, 99)), 9)])
    logits = decoder.forward(batch, driver.kv)
    cells = driver.kv.copy()
    driver.kv.fill(np.nan)
    best = decoder.pick(batch, driver.kv)
    assert best.dtype == np.int64
    assert best.tolist() == best_tokens(logits).tolist()
    assert np.array_equal(cells, driver.kv, equal_nan=True)
