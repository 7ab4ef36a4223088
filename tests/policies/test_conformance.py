"""What every policy must keep, whatever it prefers: answers, total orders, and an end for everybody."""

import pytest

from headway import plugins
from headway.core.policy import Policy
from headway.core.request import Request
from headway.values.params import SamplingParams
from scenario import run_scenario


def _load(name: str) -> Policy:
    policy: Policy = plugins.load("policies", name)()
    return policy


@pytest.fixture(params=plugins.names("policies"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_policy_changes_when_never_what(name: str) -> None:
    for seed in range(150):
        try:
            run_scenario(seed, _load(name))
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error


def test_keys_are_comparable_and_do_not_change_while_a_request_waits(name: str) -> None:
    policy = _load(name)
    requests = [
        Request(id, [1] * (1 + id * 7 % 5), SamplingParams(), arrival=id * 0.5, priority=id % 3, tenant=str(id % 2))
        for id in range(20)
    ]
    before = [policy.key(req) for req in requests]
    assert sorted(zip(before, range(20), strict=True))
    assert sorted((policy.victim_key(req), req.id) for req in requests)
    assert [policy.key(req) for req in requests] == before


def test_first_come_first_served_admits_by_arrival() -> None:
    policy = _load("fcfs")
    early, late = (Request(id, [1], SamplingParams(), arrival=float(id)) for id in range(2))
    assert policy.key(early) < policy.key(late)
    assert not policy.doomed(early, 1e9)
