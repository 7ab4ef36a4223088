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
    begin_step = WaitTotals.begin_step

    def misled(totals: WaitTotals, step: int, now: float) -> None:
        totals.reason = None if totals.reason is None else WaitReason.TOKENS
        begin_step(totals, step, now)

    monkeypatch.setattr(WaitTotals, "begin_step", misled)
    _, num_wrong = explain_check.check(explain_check.ARMS[0], 40, seed=3)
    assert num_wrong > 20
