"""Who is turned away at the door, and that it does not flap."""

from __future__ import annotations

import pytest

from headway.control.costs import CostModel, Weights
from headway.control.door import HOLD, Door
from headway.core.policy import Policy, Tools
from headway.core.request import Request
from headway.policies._shared import Shared
from headway.policies.edf import EarliestDeadlineFirst
from headway.policies.slo import SloAware
from headway.values.params import NO_SLO, SamplingParams, Slo

COSTS = CostModel(Weights(base=0.01, tokens=0.001))
FIRST = Slo(ttft=1.0)


def _door(policy: Policy | None = None) -> Door:
    policy = policy or SloAware()
    policy.attach(Tools(COSTS))
    return Door(policy, COSTS)


def _request(slo: Slo, now: float = 0.0, expected: float = 11.0) -> Request:
    return Request(0, [1] * 10, SamplingParams(max_tokens=100), arrival=now, slo=slo, expected=expected)


def test_who_would_be_a_fifth_too_late_is_told_by_how_much() -> None:
    assert _door().refuses(_request(FIRST), 1.19, 0.0) is None
    assert _door().refuses(_request(FIRST), 1.25, 0.0) == pytest.approx(0.25)


def test_a_deadline_leaves_the_first_token_what_the_rest_of_the_answer_does_not_need() -> None:
    # Ten more tokens at 10 ms each: the first must be there after 0.9 s, and 1.1 s are a fifth of the second late.
    last = Slo(deadline=1.0)
    assert _door().refuses(_request(last), 1.09, 0.0) is None
    assert _door().refuses(_request(last), 1.11, 0.0) == pytest.approx(0.21)
    both = Slo(ttft=0.5, deadline=1.0)
    assert _door().refuses(_request(both), 0.7, 0.0) == pytest.approx(0.2), "the tighter one counts"


@pytest.mark.parametrize("policy", [Policy, EarliestDeadlineFirst])
def test_a_policy_that_never_sheds_turns_nobody_away(policy: type[Policy]) -> None:
    assert _door(policy()).refuses(_request(FIRST), 1e6, 0.0) is None


def test_within_tenants_or_lanes_there_is_no_door() -> None:
    assert _door(Shared(SloAware())).refuses(_request(FIRST), 1e6, 0.0) is None


def test_a_request_without_an_objective_is_always_let_in() -> None:
    assert _door().refuses(_request(NO_SLO), 1e6, 0.0) is None
    assert _door().refuses(_request(Slo(itl=0.1)), 1e6, 0.0) is None


def test_a_shut_door_keeps_nobody_out_who_would_be_in_time() -> None:
    door = _door()
    assert door.refuses(_request(FIRST), 2.0, 0.0) is not None
    assert door.refuses(_request(FIRST), 0.9, 0.1) is None
    assert door.refuses(_request(FIRST), 1.1, 0.2) is None, "late, but within the margin"
    assert door.refuses(_request(FIRST), 2.0, 0.3) is not None, "it has not opened meanwhile"


def test_a_door_that_has_moved_stays_for_a_while() -> None:
    door = _door()
    assert door.refuses(_request(FIRST), 2.0, 0.0) is not None
    assert door.refuses(_request(FIRST), 0.5, HOLD) is None, "it opens"
    assert door.refuses(_request(FIRST), 2.0, 2 * HOLD - 0.1) is None, "and stays open, whoever comes"
    assert door.refuses(_request(FIRST), 2.0, 2 * HOLD) is not None


def test_what_is_within_the_margin_does_not_open_it() -> None:
    door = _door()
    assert door.refuses(_request(FIRST), 2.0, 0.0) is not None
    assert door.refuses(_request(FIRST), 1.1, 2 * HOLD) is None
    assert door.refuses(_request(FIRST), 2.0, 2 * HOLD + 0.1) is not None


def test_each_class_has_its_own_door() -> None:
    door, patient = _door(), Slo(ttft=20.0)
    assert door.refuses(_request(FIRST), 2.0, 0.0) is not None
    assert door.refuses(_request(patient), 2.0, 0.1) is None
    assert door.refuses(_request(patient), 30.0, 0.2) == pytest.approx(10.0)
    assert door.refuses(_request(FIRST), 0.5, HOLD) is None
    assert door.refuses(_request(patient), 30.0, HOLD + 0.1) is not None, "the other one is still shut"
