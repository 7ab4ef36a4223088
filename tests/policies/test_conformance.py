"""Every policy through the whole conformance suite, by itself and within shares; and bad ones, which it must catch.

Another one is checked with `--policy my.module:Thing`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from conformance import CHECKS, SHARES, maker, variants
from headway import plugins
from headway.core.policy import Key, Policy
from headway.core.queue import OrderedQueue, RankQueue
from headway.core.request import Account, Request
from headway.errors import ConfigError
from headway.values.params import NO_SLO, SamplingParams
from headway.values.work import Work

LIFO = variants("lifo:LastComeFirstServed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        names = [*plugins.names("policies"), *metafunc.config.getoption("--policy")]
        cases = [(name, variant) for name in names for variant in variants(name)]
        metafunc.parametrize(("name", "variant"), cases, ids=[variant for _, variant in cases])


@pytest.mark.parametrize("check", CHECKS)
def test_a_policy_keeps_what_all_must(name: str, variant: str, check: str) -> None:
    CHECKS[check](variants(name)[variant])


@pytest.mark.parametrize("shares", SHARES, ids=lambda shares: "+".join(shares))
@pytest.mark.parametrize("name", plugins.names("policies"))
def test_a_policy_works_within_shares_or_says_that_it_cannot(name: str, shares: dict[str, Any]) -> None:
    make = maker(name, **shares)
    if name in ("srpt", "mlfq", "lpm", "priority"):
        with pytest.raises(ConfigError, match="cannot be used within lanes or tenants"):
            make()
    else:
        assert not make().is_global_order


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("way", LIFO)
def test_a_policy_that_declares_another_order_among_equals_keeps_the_rest(way: str, check: str) -> None:
    CHECKS[check](LIFO[way])


def test_first_come_first_served_admits_by_arrival() -> None:
    policy = maker("fcfs")()
    early, late = (Request(id, [1], SamplingParams(), arrival=float(id)) for id in range(2))
    assert policy.key(early) < policy.key(late)
    assert not policy.is_infeasible(early, 1e9)


class KeyMoves(Policy):
    """Keys grow with the tokens generated."""

    num_given = 0

    def key(self, req: Request) -> Key:
        return (req.arrival + self.num_given,)

    def on_tokens(self, account: Account, num_in: int, num_out: int) -> None:
        self.num_given += num_out


class KeysOfWords(Policy):
    def key(self, req: Request) -> Key:
        return (req.tenant,)  # type: ignore[return-value]


class KeysOfNoNumber(Policy):
    def victim_key(self, req: Request) -> Key:
        return (float("nan") if req.slo == NO_SLO else req.arrival,)


class KeysOfSeveralLengths(Policy):
    def key(self, req: Request) -> Key:
        return (req.arrival,) if req.slo == NO_SLO else (req.arrival, req.priority)


class ByChance(Policy):
    _counts = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self._salt = next(self._counts) * 7919 + 1

    def key(self, req: Request) -> Key:
        return (req.id * self._salt % 101,)


class LatestFirst(Policy):
    def key(self, req: Request) -> Key:
        return (-req.arrival,)


class OneAtATime(Policy):
    def waits(self, req: Request, work: Work) -> bool:
        return True


class ShortestForEver(Policy):
    def key(self, req: Request) -> Key:
        return (req.num_prompt,)


class ShortAnswersForEver(Policy):
    def key(self, req: Request) -> Key:
        return (req.likely_output, req.arrival)


class LongestForEver(Policy):
    def key(self, req: Request) -> Key:
        return (-req.likely_output, req.arrival)


class _Forgetful(RankQueue):
    def push(self, req: Request) -> None:
        if req.id % 10 != 9:
            super().push(req)


class LosesSome(Policy):
    def queue(self) -> OrderedQueue:
        return _Forgetful(self.key)


class ShedsTheRunning(Policy):
    """Sheds preempted requests."""

    def is_infeasible(self, req: Request, now: float) -> bool:
        return req.num_preempted > 0


BAD = [
    (KeyMoves, "keys", "while it waits"),
    (KeysOfWords, "orders", "each part must be a number"),
    (KeysOfNoNumber, "orders", "victim_key gave"),
    (KeysOfSeveralLengths, "orders", "several lengths"),
    (ByChance, "equals", "two runs of one load differ"),
    (LatestFirst, "equals", "started before older ones"),
    (OneAtATime, "slots", "40 equal requests take"),
    (ShortestForEver, "starvation", "until no other comes"),
    (ShortAnswersForEver, "starvation", "'num_output': 30. waits"),
    (LongestForEver, "starvation", "until no other comes"),
    (LosesSome, "orders", "never hands out"),
    (LosesSome, "answers", "in no place"),
    (ShedsTheRunning, "ends", "was shed after"),
]


@pytest.mark.parametrize(("bad", "check", "says"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_a_bad_policy_is_caught(bad: type[Policy], check: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        CHECKS[check](bad)


@pytest.mark.parametrize("check", CHECKS)
def test_the_default_is_not_caught(check: str) -> None:
    CHECKS[check](Policy)
