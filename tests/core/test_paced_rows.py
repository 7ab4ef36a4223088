"""Rows that wait for their results get a token in each step, as rows that decode do, whatever runs beside them."""

from __future__ import annotations

import pytest

from headway.control.costs import CostModel, CostWeights
from headway.control.pacer import TargetPacer
from headway.core.request import Request
from headway.values.events import Preempted
from headway.values.states import State
from rig import Rig

COSTS = CostModel(CostWeights(base=22e-3, tokens=0.14e-3, decode=0.14e-3))


def paced(target: float) -> Rig:
    pacer = TargetPacer(COSTS, target, block_size=4)
    return Rig(num_blocks=2000, rows=32, tokens=512, pacer=pacer)


def begin(rig: Rig, num_waiting: int, num_decoding: int) -> list[Request]:
    """Rows that wait for their results and rows that decode, each with a first token."""
    requests = [rig.add([i, 1, 2], 90, needs_feedback=i < num_waiting) for i in range(num_waiting + num_decoding)]
    for _ in range(50):
        rig.step()
        if all(req.num_output for req in requests):
            return requests
    raise AssertionError("some never begin")


@pytest.mark.parametrize("target", [0.001, 0.0235, 0.1])
def test_every_row_gets_a_token_in_each_step_whatever_the_target(target: float) -> None:
    rig = paced(target)
    requests = begin(rig, 6, 6)
    before = [req.num_output for req in requests]
    for _ in range(20):
        rig.step()
    assert [req.num_output - num for req, num in zip(requests, before, strict=True)] == [20] * 12


@pytest.mark.parametrize("num_decoding", [0, 3])
def test_a_prompt_goes_on_beside_them_though_the_target_is_infeasible(num_decoding: int) -> None:
    rig = paced(0.001)
    begin(rig, 3, num_decoding)
    late = rig.add(list(range(45)) * 3, 2)
    for _ in range(20):
        rig.step()
    assert late.num_output


def test_the_target_bounds_prompts_where_no_row_decodes_ahead() -> None:
    rig = paced(0.03)
    begin(rig, 6, 0)
    rig.add(list(range(50)) * 20, 2)
    taken = [COSTS.step(plan.work) for _ in range(12) if (plan := rig.step()) is not None]
    assert max(taken) <= 0.03


def test_they_are_no_prompts_under_way() -> None:
    """As many prompts as allowed start beside a long one, so that a short one need not wait for its end."""
    rig = Rig(num_blocks=2000, rows=32, tokens=64)
    requests = begin(rig, 6, 0)
    rig.add(list(range(50)) * 20, 2)
    rig.step()
    short = rig.add([7, 8, 9], 2)
    for _ in range(3):
        rig.step()
    assert short.num_output
    assert all(req.needs_feedback for req in requests)


@pytest.mark.parametrize("num_waiting", [1, 2, 6])
def test_an_older_prompt_that_fills_every_step_does_not_hold_them_up(num_waiting: int) -> None:
    """Every fourth chunk goes to the oldest prompt, which would take all the room."""
    rig = Rig(num_blocks=8000, rows=32, tokens=64)
    old = rig.add([i % 50 for i in range(16_000)], 2)
    rig.step()
    requests = begin(rig, num_waiting, 0)
    before = [req.num_output for req in requests]
    for _ in range(40):
        rig.step()
    assert [req.num_output - num for req, num in zip(requests, before, strict=True)] == [40] * num_waiting
    assert old.num_computed > 40 * (64 - num_waiting)


def test_draft_tokens_preempt_nothing() -> None:
    """Wrong guesses for rows whose memory is short: as many preemptions as without them."""

    def run(num_drafts: int) -> int:
        rig = Rig(num_blocks=40, block_size=4, rows=8, tokens=128)
        requests = [rig.add([i, i + 1, i + 2], 30, needs_feedback=True) for i in range(6)]
        while any(req.state is not State.DONE for req in requests):
            for req in requests:
                if req.row >= 0:
                    req.draft = (51,) * num_drafts
            rig.step()
        rig.verify()
        return len(rig.log.of(Preempted))

    without = run(0)
    assert without, "memory is not short"
    assert run(8) <= without
