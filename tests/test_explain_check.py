"""Explanations are those of the plans: a small run of `tools/explain_check.py`, and proof that it can find fault."""

from __future__ import annotations

import pytest

import explain_check
from headway.core.waits import WaitTotals
from headway.values.states import WaitReason


@pytest.mark.parametrize("arm", explain_check.ARMS, ids=lambda arm: arm.name)
def test_parts_add_up_and_reasons_are_those_of_the_plans(arm: explain_check.Arm) -> None:
    line, num_wrong = explain_check.check(arm, 80, seed=3)
    assert num_wrong == 0, line


def test_a_wrong_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = WaitTotals.wait_for
    monkeypatch.setattr(WaitTotals, "wait_for", lambda self, reason: wait_for(self, WaitReason.TOKENS))
    _, num_wrong = explain_check.check(explain_check.ARMS[0], 40, seed=3)
    assert num_wrong > 20
