"""Which requests SLO admission rejects, and its hysteresis."""

from __future__ import annotations

import pytest

from headway.control.costs import CostModel, CostWeights
from headway.control.slo_admission import HOLD, SloAdmission
from headway.core.policy import Policy, PolicyContext
from headway.core.request import Request
from headway.policies._shared import Shared
from headway.policies.edf import EarliestDeadlineFirst
from headway.policies.slo import SloAware
from headway.values.params import NO_SLO, SamplingParams, Slo

COSTS = CostModel(CostWeights(base=0.01, tokens=0.001))
FIRST = Slo(ttft=1.0)


def _slo_admission(policy: Policy | None = None) -> SloAdmission:
    policy = policy or SloAware()
    policy.attach(PolicyContext(COSTS))
    return SloAdmission(policy, COSTS)


def _request(slo: Slo, now: float = 0.0, expected: float = 11.0) -> Request:
    return Request(0, [1] * 10, SamplingParams(max_tokens=100), arrival=now, slo=slo, expected=expected)


def test_a_request_that_would_be_a_fifth_late_is_rejected_with_the_lateness() -> None:
    assert _slo_admission().rejects(_request(FIRST), 1.19, 0.0) is None
    assert _slo_admission().rejects(_request(FIRST), 1.25, 0.0) == pytest.approx(0.25)


def test_a_deadline_leaves_the_first_token_what_the_rest_of_the_answer_does_not_need() -> None:
    # Ten more tokens at 10 ms each: the first must be there after 0.9 s, and 1.1 s are a fifth of the second late.
    last = Slo(deadline=1.0)
    assert _slo_admission().rejects(_request(last), 1.09, 0.0) is None
    assert _slo_admission().rejects(_request(last), 1.11, 0.0) == pytest.approx(0.21)
    both = Slo(ttft=0.5, deadline=1.0)
    assert _slo_admission().rejects(_request(both), 0.7, 0.0) == pytest.approx(0.2), "the tighter one counts"


@pytest.mark.parametrize("policy", [Policy, EarliestDeadlineFirst])
def test_a_policy_that_never_sheds_rejects_no_request(policy: type[Policy]) -> None:
    assert _slo_admission(policy()).rejects(_request(FIRST), 1e6, 0.0) is None


def test_within_tenants_or_lanes_no_request_is_rejected() -> None:
    assert _slo_admission(Shared(SloAware())).rejects(_request(FIRST), 1e6, 0.0) is None


def test_a_request_without_an_objective_is_never_rejected() -> None:
    assert _slo_admission().rejects(_request(NO_SLO), 1e6, 0.0) is None
    assert _slo_admission().rejects(_request(Slo(itl=0.1)), 1e6, 0.0) is None


def test_closed_admission_accepts_a_request_that_would_be_in_time() -> None:
    slo_admission = _slo_admission()
    assert slo_admission.rejects(_request(FIRST), 2.0, 0.0) is not None
    assert slo_admission.rejects(_request(FIRST), 0.9, 0.1) is None
    assert slo_admission.rejects(_request(FIRST), 1.1, 0.2) is None, "late, but within the margin"
    assert slo_admission.rejects(_request(FIRST), 2.0, 0.3) is not None, "it has not opened meanwhile"


def test_admission_that_has_opened_or_closed_stays_so_for_a_while() -> None:
    slo_admission = _slo_admission()
    assert slo_admission.rejects(_request(FIRST), 2.0, 0.0) is not None
    assert slo_admission.rejects(_request(FIRST), 0.5, HOLD) is None, "it opens"
    assert slo_admission.rejects(_request(FIRST), 2.0, 2 * HOLD - 0.1) is None, "and stays open"
    assert slo_admission.rejects(_request(FIRST), 2.0, 2 * HOLD) is not None


def test_a_request_within_the_margin_does_not_open_it() -> None:
    slo_admission = _slo_admission()
    assert slo_admission.rejects(_request(FIRST), 2.0, 0.0) is not None
    assert slo_admission.rejects(_request(FIRST), 1.1, 2 * HOLD) is None
    assert slo_admission.rejects(_request(FIRST), 2.0, 2 * HOLD + 0.1) is not None


def test_each_class_opens_and_closes_on_its_own() -> None:
    slo_admission, patient = _slo_admission(), Slo(ttft=20.0)
    assert slo_admission.rejects(_request(FIRST), 2.0, 0.0) is not None
    assert slo_admission.rejects(_request(patient), 2.0, 0.1) is None
    assert slo_admission.rejects(_request(patient), 30.0, 0.2) == pytest.approx(10.0)
    assert slo_admission.rejects(_request(FIRST), 0.5, HOLD) is None
    assert slo_admission.rejects(_request(patient), 30.0, HOLD + 0.1) is not None, "the other one is still closed"
