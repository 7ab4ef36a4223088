"""Random scenarios against the one-at-a-time oracle: chunking, sharing, preemption, abort, forks, depth 1 to 3."""

import pytest

from scenario import run_scenario


@pytest.mark.parametrize("part", range(10))
def test_any_scenario_equals_the_oracle(part: int) -> None:
    preempted = 0
    for seed in range(part * 100, part * 100 + 100):
        try:
            rig = run_scenario(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        preempted += sum(req.num_preempted for req in rig.accepted.values())
    assert preempted > 30  # the scenarios really put pressure on the pool
