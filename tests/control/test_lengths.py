"""Averages of answers: by tenant and route, censored ones only upwards, never beyond what may be asked."""

from __future__ import annotations

import pytest

from headway.control.lengths import MOST, PRIOR, Lengths
from headway.core.request import Request
from headway.errors import RequestError
from headway.values.params import SamplingParams, Slo


def test_before_the_first_answer_the_ceiling_is_a_constant_whatever_is_declared() -> None:
    assert Lengths().expect("a", "r", 100) == (100.0, 100.0)
    assert Lengths().expect("a", "r", 30_000) == (30_000.0, PRIOR)


def test_each_tenant_and_route_has_its_own_average_and_a_new_one_that_of_all() -> None:
    lengths = Lengths()
    for _ in range(50):
        lengths.learn("a", "chat", 20, is_cut=False)
        lengths.learn("b", "chat", 200, is_cut=False)
    assert lengths.expect("a", "chat", 1000).median == pytest.approx(20, rel=0.01)
    assert lengths.expect("b", "chat", 1000).median == pytest.approx(200, rel=0.01)
    assert 20 < lengths.expect("c", "chat", 1000).median < 200
    assert lengths.expect("b", "chat", 50) == (50.0, 50.0)
    assert lengths.expect("a", "chat", 1000).ceiling >= 20


def test_a_spread_makes_the_ceiling_higher() -> None:
    lengths = Lengths()
    for i in range(200):
        lengths.learn("a", "", 10 if i % 2 else 400, is_cut=False)
    expected = lengths.expect("a", "", 10_000)
    assert 30 < expected.median < 130
    assert expected.ceiling > 3 * expected.median


def test_what_was_cut_off_only_raises_an_average() -> None:
    lengths = Lengths()
    for _ in range(20):
        lengths.learn("a", "", 100, is_cut=False)
    for _ in range(20):
        lengths.learn("a", "", 5, is_cut=True)
    assert lengths.expect("a", "", 1000).median == pytest.approx(100, rel=0.01)
    for _ in range(20):
        lengths.learn("a", "", 500, is_cut=True)
    assert lengths.expect("a", "", 1000).median > 150
    lengths.learn("a", "", 0, is_cut=True)


def test_only_so_many_averages_are_kept() -> None:
    lengths = Lengths()
    for tenant in range(MOST + 10):
        lengths.learn(str(tenant), "", 10, is_cut=False)
    assert len(lengths._of) == MOST


def test_an_objective_has_sane_bounds() -> None:
    for wrong in (0.0, -1.0, 1e9, float("nan"), "soon"):
        with pytest.raises(RequestError, match=r"slo\.itl is .*; allowed: above 0"):
            Slo(itl=wrong)  # type: ignore[arg-type]


def test_a_predicted_length_grows_with_the_tokens_generated() -> None:
    req = Request(0, [1, 2], SamplingParams(max_tokens=50), expected=10.0)
    assert req.likely_output == 10.0
    req.tokens += [3] * 20
    assert req.likely_output == 21.0
    req.tokens += [3] * 30
    assert req.likely_output == 50.0
    assert Request(0, [1], SamplingParams(max_tokens=50)).likely_output == 50.0
