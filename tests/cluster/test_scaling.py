"""How many engines a load needs, and what a front knows of its load."""

from __future__ import annotations

import math
import random

import pytest

from echo_join import killed, start_echo
from headway.cluster.scaling import ClusterLoad, ScaleRule, engines_needed, measure
from headway.engine.client import Submit
from joined_fleet import front, params, port_of, until

RULE = ScaleRule(requests=10.0, wait_s=1.0)


def load(num_requests: int, wait_s: float = 0.0, num_engines: int = 1, num_slots: int = 64) -> ClusterLoad:
    return ClusterLoad(num_requests, wait_s, num_engines, num_slots)


@pytest.mark.parametrize(
    ("seen", "now", "needed"),
    [
        (load(0), 1, 1),
        (load(10), 1, 1),
        (load(11), 1, 2),
        (load(95), 1, 10),
        (load(11, num_engines=1), 2, 2),  # the second one is on its way
        (load(9, num_engines=2), 2, 2),  # one would be enough without anything to spare
        (load(8, num_engines=2), 2, 1),
        (load(0, num_engines=3), 3, 1),
        (load(5, wait_s=1.5), 1, 2),  # slots are free, and still requests wait
        (load(5, wait_s=100.0), 1, 2),  # not more than twice as many at once
        (load(5, wait_s=100.0), 2, 2),  # nor once more before the second one is there
        (load(5, wait_s=0.6, num_engines=2), 2, 2),  # fewer only when none waits for long
        (load(5, wait_s=0.5, num_engines=2), 2, 1),
        (load(50, num_engines=0), 3, 3),  # no engine is there: more of them are no answer
    ],
)
def test_engines_follow_requests_and_waits(seen: ClusterLoad, now: int, needed: int) -> None:
    assert engines_needed(seen, now, RULE) == needed


def test_without_a_number_an_engine_is_given_as_many_requests_as_it_has_slots() -> None:
    rule = ScaleRule(requests=None, wait_s=1.0)
    assert engines_needed(load(129, num_slots=64), 1, rule) == 3
    assert engines_needed(load(129, num_slots=0), 1, rule) == 1


def test_a_steady_load_comes_to_a_number_and_stays_there() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        num_requests, start = rng.randrange(500), rng.randrange(1, 60)
        seen = [start]
        for _ in range(5):
            seen.append(engines_needed(load(num_requests, num_engines=seen[-1]), seen[-1], RULE))
        assert seen[1] == seen[2] == seen[-1]
        assert math.ceil(num_requests / 10) <= seen[-1] <= max(start, math.ceil(num_requests / 8) or 1)


async def test_the_load_of_a_front_is_every_open_request_wherever_it_is() -> None:
    async with front() as client:
        assert measure(client) == ClusterLoad(0, 0.0, 0, 0)
        with killed([start_echo(port_of(client), name) for name in "ab"]):
            await until(client, 2)
            assert measure(client) == ClusterLoad(0, 0.0, 2, 64)
            for id in range(1, 8):
                client.submit(Submit(id, [65, 66], params(100_000)))
            assert measure(client).num_requests == 7
            client.end_all()
        await until(client, 0)
        assert measure(client).num_engines == 0
