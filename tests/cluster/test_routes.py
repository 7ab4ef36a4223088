"""Index, load and routes by themselves: no process, no engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from headway import plugins
from headway.cluster.breaker import Breaker, RetryBudget
from headway.cluster.index import HolderIndex
from headway.cluster.replica import Replica, add_up, split
from headway.cluster.routes._route import Route, load_route, new_tokens
from headway.cluster.routes.cost import CostRoute
from headway.cluster.routes.least_loaded import LeastLoadedRoute
from headway.cluster.routes.round_robin import RoundRobinRoute
from headway.cluster.routes.session import SessionRoute
from headway.config import EngineConfig, ServerConfig
from headway.engine.client import EngineInfo, Submit
from headway.engine.messages import KEY_BYTES
from headway.engine.published import Published
from headway.errors import ConfigError, RequestError
from headway.kv.prefix import chain_keys, chain_seed
from headway.serve.intent import Intent
from headway.serve.overload import QueueGuard
from headway.values.params import SamplingParams

BLOCK = 16
INFO = EngineInfo("m", 4096, 300, BLOCK, 100, 8, identity="m:1")


def replica(number: int) -> Replica:
    engine: Any = SimpleNamespace(info=INFO, name=str(number))
    return Replica(number, engine)


def submit(id: int, tokens: list[int]) -> Submit:
    return Submit(id, tokens, SamplingParams())


def keys_of(tokens: list[int]) -> list[bytes]:
    seed = chain_seed(INFO.identity, "", "", b"")
    return [key[:KEY_BYTES] for key in chain_keys(tokens, BLOCK, seed)]


def test_the_index_agrees_with_sets_of_keys_under_random_changes() -> None:
    rng, index = random.Random(0), HolderIndex()
    chains = [[bytes([chain, at]) * 8 for at in range(6)] for chain in range(5)]
    held: list[set[bytes]] = [set() for _ in range(4)]
    for _ in range(400):
        number, chain = rng.randrange(4), rng.choice(chains)
        if rng.random() < 0.05:
            held[number].clear()
            index.drop(number)
        else:
            added = set(rng.sample(chain, rng.randrange(4)))
            removed = set(rng.sample(chain, rng.randrange(3))) - added
            held[number] = (held[number] | added) - removed
            index.change(number, added, removed)
        for keys in chains:
            counts = [next((at for at, key in enumerate(keys) if key not in each), len(keys)) for each in held]
            assert index.num_held(keys, 4) == counts
    for number in range(4):
        index.drop(number)
    assert not len(index)


def test_new_tokens_are_those_that_the_replica_does_not_hold_and_one_at_least() -> None:
    index, replicas = HolderIndex(), [replica(0), replica(1), replica(2)]
    prompt = list(range(1, 2 * BLOCK + 1))
    assert new_tokens(submit(1, prompt), replicas, index) == [32, 32, 32]
    index.change(1, keys_of(prompt)[:1], [])
    index.change(2, keys_of(prompt), [])
    assert new_tokens(submit(1, prompt), replicas, index) == [32, 16, 1]
    assert new_tokens(submit(1, [*prompt, 7]), replicas, index) == [33, 17, 1]
    other = Submit(1, prompt, SamplingParams(), namespace=b"another tenant")
    assert new_tokens(other, replicas, index) == [32, 32, 32]


def test_cost_goes_to_the_holder_until_that_one_is_busier_than_the_prefix_is_worth() -> None:
    index, replicas, route = HolderIndex(), [replica(0), replica(1)], CostRoute()
    prompt = list(range(1, 10 * BLOCK + 1))
    index.change(1, keys_of(prompt)[:9], [])
    homes = []
    for id in range(1, 13):
        chosen, new = route.choose(submit(id, prompt), replicas, index)
        chosen.sent(id, new)
        homes.append(chosen.number)
    assert homes[0] == 1
    assert homes.count(1) > homes.count(0) > 0


def test_cost_stays_with_a_holder_that_is_a_little_busier_and_leaves_one_that_is_much_busier() -> None:
    prompt = list(range(1, 10 * BLOCK + 1))
    for num_others, wanted in ((6, 1), (40, 0)):
        index, replicas, route = HolderIndex(), [replica(0), replica(1)], CostRoute()
        index.change(1, keys_of(prompt)[:5], [])  # half of it: by the cost alone three others would outweigh that
        for id in range(num_others):
            replicas[1].sent(1000 + id, 1)
        for id in range(2):
            replicas[0].sent(2000 + id, 1)
        assert route.choose(submit(1, prompt), replicas, index)[0].number == wanted


def test_cost_spreads_unique_prompts_as_the_least_loaded_route_does() -> None:
    rng, index = random.Random(1), HolderIndex()
    for route in (CostRoute(), LeastLoadedRoute()):
        replicas = [replica(number) for number in range(4)]
        for id in range(1, 401):
            tokens = [rng.randrange(300) for _ in range(rng.randrange(8, 200))]
            chosen, new = route.choose(submit(id, tokens), replicas, index)
            chosen.sent(id, new)
        counts = [each.num_requests for each in replicas]
        assert max(counts) <= 1.3 * 100, type(route)


def test_round_robin_takes_turns_among_those_that_are_there() -> None:
    route, index = RoundRobinRoute(), HolderIndex()
    replicas = [replica(number) for number in range(3)]
    turns = [route.choose(submit(id, [1, 2]), replicas, index)[0].number for id in range(1, 5)]
    assert turns == [0, 1, 2, 0]
    assert route.choose(submit(5, [1]), [replicas[0], replicas[2]], index)[0].number == 2


@pytest.mark.parametrize("name", ["cost", "least_loaded", "round_robin", "session"])
def test_a_route_is_found_by_name(name: str) -> None:
    route: Route = plugins.load("cluster.routes", name)()
    assert route.choose(submit(1, [1]), [replica(0)], HolderIndex())[0].number == 0


def test_an_unknown_route_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match="cost, least_loaded, round_robin"):
        plugins.load("cluster.routes", "nearest")


@pytest.mark.parametrize("name", ["json:loads", "json:JSONDecoder", "nearest"])
def test_what_is_no_route_is_an_error_of_the_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match=name.rpartition(":")[2]):
        load_route(name)


def test_load_is_what_the_engine_said_and_what_it_was_sent_since() -> None:
    one = replica(0)
    one.sent(5, 40)
    one.sent(6, 10)
    assert (one.num_requests, one.num_prefill) == (2, 50)
    one.take(Published(last_id=5, num_waiting=3, num_running=4, num_prefill=70))
    assert (one.num_requests, one.num_prefill) == (8, 80)
    one.gone(6)
    one.gone(6)
    assert (one.num_requests, one.num_prefill) == (7, 70)
    one.renew()
    assert (one.num_requests, one.num_prefill) == (0, 0)


def test_numbers_of_replicas_add_up_to_those_of_one_engine() -> None:
    one, two = replica(0), replica(1)
    one.take(Published(9, 0, 3, 10, 0.4, {"": 1.2}, num_running=8, num_prefill=100))
    two.take(Published(7, 2, 0, 10, 0.4, {"": 0.0}, num_running=6, num_prefill=0))
    both = add_up([one, two], 9)
    assert (both.last_id, both.num_free, both.num_waiting, both.max_waiting) == (9, 2, 3, 20)
    assert (both.each_s, both.waits, both.num_running, both.num_prefill) == (0.2, {"": 0.0}, 14, 100)
    assert both.most_answers == 10
    for id in (12, 13, 14, 15):
        two.sent(id, 5)
    more = add_up([one, two], 15)
    assert (more.last_id, more.num_free, more.num_waiting) == (15, 0, 5), "two of the four find a slot"
    assert more.waits == {"": 0.8}, "and each of the others adds to the wait, still shorter than that of the first"


def test_a_replica_that_is_silent_does_not_make_a_fleet_full() -> None:
    silent, other = replica(0), replica(1)
    guard = QueueGuard(10.0)
    silent.take(Published(0, 8, 0, 20, 0.1, {"": 0.0}))
    other.take(Published(0, 8, 0, 20, 0.1, {"": 0.0}))
    silent.sent(1, 5)
    guard.sent(1, "")
    for id in range(2, 200):
        other.sent(id, 5)
        guard.sent(id, "")
        other.take(Published(id, 8, 0, 20, 0.1, {"": 0.0}))
        guard.check(add_up([silent, other], id), Intent())
        guard.begun(id)
        other.gone(id)


def test_one_request_may_have_as_many_answers_as_may_wait_at_one_replica() -> None:
    one, two = replica(0), replica(1)
    for each in (one, two):
        each.take(Published(0, 2, 0, 4, 0.1, {"": 0.0}))
    QueueGuard(10.0).check(add_up([one, two], 0), Intent(), 4)
    with pytest.raises(RequestError, match="up to 4"):
        QueueGuard(10.0).check(add_up([one, two], 0), Intent(), 5)


def test_a_full_replica_has_no_room() -> None:
    one = replica(0)
    assert one.has_room
    one.take(Published(0, 1, 2, 4, 0.1, {"": 0.2}))
    one.sent(1, 5)
    one.sent(2, 5)
    assert (one.num_queued, one.has_room) == (3, True)
    one.sent(3, 5)
    assert not one.has_room


def test_replicas_share_the_cores_and_have_step_logs_of_their_own() -> None:
    config = EngineConfig.of(threads=None, step_log="steps.jsonl")
    assert split(config, 1) == [config]
    parts = split(config, 2)
    assert [part.scheduler.step_log for part in parts] == ["steps.jsonl.0", "steps.jsonl.1"]
    assert all((part.model.threads or 0) >= 1 for part in parts)
    assert [part.model.threads for part in split(EngineConfig.of(threads=3), 2)] == [3, 3]


def test_a_number_of_replicas_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ServerConfig(replicas=0)


def test_a_session_stays_where_it_is_when_other_replicas_come_and_go() -> None:
    route, index, replicas = SessionRoute(), HolderIndex(), [replica(number) for number in range(5)]

    def homes(among: list[Replica]) -> dict[str, int]:
        asks = {f"user{at}": Submit(at, [1, 2], SamplingParams(), tenant=f"user{at}") for at in range(200)}
        return {name: route.choose(ask, among, index)[0].number for name, ask in asks.items()}

    before = homes(replicas)
    assert all(20 <= list(before.values()).count(number) <= 60 for number in range(5))
    assert homes(replicas[::-1]) == before
    after = homes(replicas[:4])
    assert all(after[name] == number for name, number in before.items() if number != 4)
    assert homes([*replicas, replica(5)]) != before
    unnamed = route.choose(submit(1, [1]), replicas, index)[0]
    assert route.scores[unnamed.engine.name] == min(route.scores.values())


def test_a_breaker_opens_after_failures_in_a_row_and_closes_by_a_probe() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.failed(0.0)
    breaker.went_well(1)
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.admits(0.0), "they were not in a row"
    breaker.failed(0.0)
    assert (breaker.admits(0.9), breaker.admits(1.0), breaker.state) == (False, True, "open")
    breaker.sent(7, 1.0)
    assert (breaker.admits(1.0), breaker.state) == (False, "half-open")
    breaker.failed(1.5)
    assert (breaker.admits(3.4), breaker.admits(3.5)) == (False, True), "twice the pause"
    breaker.sent(8, 3.5)
    breaker.left(8)
    breaker.sent(9, 3.6)
    breaker.went_well(8)
    assert breaker.state == "half-open"
    breaker.went_well(9)
    assert (breaker.admits(3.6), breaker.state) == (True, "closed")


def test_a_storm_of_retries_stays_within_a_fifth_of_what_came() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.offered()
        while budget.spend():
            pass
    assert budget.num_attempts <= 1.2 * budget.num_offered
    for _ in range(5):
        budget.charge()
    budget.offered()
    assert not budget.spend(), "what had to be tried again is paid for first"
