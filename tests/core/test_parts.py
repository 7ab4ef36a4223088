"""The small parts: request, pool, queue, prefix index, ledger, calendars."""

import math
import random
import sys
from itertools import pairwise

import pytest

from headway.core.blocked import BlockedOnPrefix
from headway.core.ledger import KVLedger
from headway.core.policy import Policy
from headway.core.preemption import preempt
from headway.core.queue import RankQueue, first_live
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.waiting import WaitingQueue
from headway.core.waits import WaitTotals
from headway.errors import RequestError
from headway.kv.blocks import BlockPool
from headway.kv.prefix import PrefixIndex, chain_keys, chain_seed, extend_keys
from headway.values.limits import Limits, Victims
from headway.values.params import SamplingParams, choice_seed
from headway.values.plan import Chunk, Samples, StepPlan, array
from headway.values.states import TRANSITIONS, State
from rig import Rig


def _request(id: int = 0, arrival: float = 0.0, prompt: int = 4) -> Request:
    return Request(id, list(range(prompt)), SamplingParams(max_tokens=4), arrival=arrival)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", 0), ("max_tokens", True), ("max_tokens", 1.5), ("min_tokens", -1), ("min_tokens", 129),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("temperature", True),
        ("top_k", -1), ("top_k", 1.0), ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1), ("repetition_penalty", 0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("logit_bias", {-1: 0.0}), ("logit_bias", {1: 101}),
        ("logit_bias", {1: float("inf")}), ("logprobs", 21), ("logprobs", True), ("stop", ""), ("stop", ["a", ""]),
        ("stop_token_ids", [-1]), ("ignore_eos", 1), ("seed", 2**64), ("seed", 1.0), ("n", 0),
    ],
)  # fmt: skip
def test_sampling_params_refuse_what_they_cannot_mean(field: str, bad: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: bad})
    assert caught.value.param == field
    assert "allowed" in str(caught.value)


def test_sampling_params_take_stops_in_both_forms() -> None:
    assert SamplingParams(stop="x").stops == ("x",)
    assert SamplingParams(stop=["x", "y"]).stops == ("x", "y")
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy


def test_each_of_n_answers_has_a_seed_of_its_own() -> None:
    seeds = {choice_seed(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(100)}
    assert len(seeds) == 300
    assert choice_seed(7, 0) == 7
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_states_move_only_along_the_table() -> None:
    for start in State:
        for to in State:
            req = _request()
            req.state = start
            if to in TRANSITIONS[start]:
                req.move(to)
                assert req.state is to
            else:
                with pytest.raises(AssertionError, match="not in the table"):
                    req.move(to)


def test_pool_takes_clean_blocks_first_then_the_oldest_idle_all_or_nothing() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    assert pool.take(3) == [0, 1, 2]
    pool.release([1, 0], kept=[0, 1])
    assert (pool.available, pool.num_idle) == (3, 2)
    assert pool.take(4) is None
    assert evicted == []
    assert pool.take(2) == [3, 1]
    assert evicted == [1]
    assert pool.num_idle_of([0, 1, 3]) == 1
    pool.share([0])
    assert pool.num_idle_of([0, 1, 3]) == 0
    assert pool.refs[0] == 1
    pool.release([3])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([3])


def test_a_settled_block_is_one_that_no_uncollected_plan_names() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, evicted.append)
    assert pool.take(5) == [0, 1, 2, 3, 4]
    pool.release([0], {0})  # before the first plan
    pool.release([1])
    pool.newest = 0
    pool.release([2], {2})  # plan 0 may name them
    pool.release([3])
    pool.name(5)  # and the next one this
    assert pool.take_settled(3) is None
    assert (pool.available, evicted) == (5, [])
    assert pool.take_settled(2) == [1, 0]
    assert (evicted, [pool.refs[b] for b in range(6)]) == ([0], [1, 1, 0, 0, 1, 0])
    pool.collected = 0
    assert pool.take_settled(2) == [3, 2]
    assert pool.take_settled(1) is None
    pool.newest = pool.collected = 1
    assert pool.take_settled(1) == [5]
    pool.release([5])
    assert pool.take(1) == [5], "a request that writes within the plans need not wait"


def _keyed(*keys: float) -> tuple[RankQueue, list[Request]]:
    requests = [_request(id) for id in range(len(keys))]
    return RankQueue(lambda req: (keys[req.id],)), requests


def _take_all(queue: RankQueue, now: float = 0.0) -> list[int]:
    ids = []
    while (req := queue.peek(now)) is not None:
        queue.admit(req)
        ids.append(req.id)
    return ids


def test_queue_orders_by_key_then_id() -> None:
    queue, requests = _keyed(2.0, 1.0, 1.0)
    for req in reversed(requests):
        queue.push(req)
    assert len(queue) == 3
    assert {req.id for req in queue.requests()} == {0, 1, 2}
    queue.charge(requests[0].account, 1.0)  # means nothing here
    assert _take_all(queue) == [1, 2, 0]
    assert queue.peek(0.0) is None
    assert not queue.requests()


def test_the_first_few_come_in_order_and_stay_in_the_queue() -> None:
    rng = random.Random(5)
    queue, requests = _keyed(*(rng.random() for _ in range(200)))
    for req in requests:
        queue.push(req)
    for id in rng.sample(range(200), 40):
        queue.remove(id)
    found = [req.id for req in queue.first(16, 0.0)]
    assert len(queue) == 160
    assert queue.first(0, 0.0) == []
    assert found == _take_all(queue)[:16]
    assert queue.first(16, 0.0) == []


def test_the_first_few_are_found_behind_many_that_left_and_those_are_passed_once() -> None:
    queue, requests = _keyed(*map(float, range(100)))
    for req in requests:
        queue.push(req)
    for id in range(1, 41):
        queue.remove(id)
    assert [req.id for req in queue.first(4, 0.0)] == [0, 41, 42, 43]
    assert len(queue) == len(queue._heap) == 60, "the forty are gone: the next look does not pass them again"
    assert _take_all(queue) == [0, *range(41, 100)]


def test_a_look_at_the_first_few_of_many_touches_few_of_them() -> None:
    queue, requests = _keyed(*map(float, range(5000)))
    for req in requests:
        queue.push(req)
    looked, expected = [], sorted(queue._heap)[4:8]
    assert first_live(queue._heap, 4, lambda entry: not looked.append(entry) and entry[0] > 3) == expected
    assert len(looked) <= 8


def test_every_kth_admission_takes_the_oldest() -> None:
    requests = [_request(id, arrival=float(id)) for id in range(8)]
    queue = RankQueue(lambda req: (-req.arrival,), share_every=3)
    for req in requests:
        queue.push(req)
    queue.remove(0)  # the oldest has left: the next oldest has its share
    assert _take_all(queue) == [7, 6, 1, 5, 4, 2, 3]


def test_a_turn_of_the_oldest_is_made_up_for_before_the_next_however_costly_it_was() -> None:
    """The oldest thirty cost 100 each, later ones 1: without a bound every third admission would cost 100."""
    requests = [_request(id, arrival=float(id)) for id in range(1030)]
    costs = [100.0 if req.id < 30 else 1.0 for req in requests]
    queue = RankQueue(lambda req: (costs[req.id],), share_every=3, cost=lambda req: costs[req.id])
    for req in requests:
        queue.push(req)
    order = _take_all(queue)
    assert order[:4] == [30, 31, 0, 32]
    costly = [place for place, id in enumerate(order[:1000]) if id < 30]
    assert [later - earlier for earlier, later in pairwise(costly)] == [135] * 7  # 134 others make up for one


def test_a_debt_ends_when_none_waits_since_the_unit_of_costs_may_change_then() -> None:
    unit = [1000.0]
    queue = RankQueue(lambda req: (-req.arrival,), share_every=3, cost=lambda _: unit[0])
    order = []
    for ids in (range(3), range(3, 9)):
        for id in ids:
            queue.push(_request(id, arrival=id))
        while (req := queue.peek(0.0)) is not None:
            queue.admit(req)
            order.append(req.id)
        unit[0] = 0.5
    assert order == [2, 1, 0, 8, 7, 3, 6, 5, 4]


def test_a_share_of_one_is_the_order_of_arrival_and_may_be_set_at_any_time() -> None:
    requests = [_request(id, arrival=float(id)) for id in range(6)]
    queue = RankQueue(lambda req: (-req.arrival,), share_every=2, cost=lambda _: 5.0)
    for req in requests:
        queue.push(req)
    for _ in range(2):
        first = queue.peek(0.0)
        assert first is not None
        queue.admit(first)
    queue.tune(share_every=1, boost_after=math.inf)
    assert _take_all(queue) == [1, 2, 3, 4]


def test_a_request_that_waited_long_enough_goes_first_if_asked_for() -> None:
    requests = [_request(id, arrival=float(id)) for id in range(4)]
    queue = RankQueue(lambda req: (-req.arrival,), boost_after=10.0)
    for req in requests:
        queue.push(req)
    assert _take_all(queue, now=11.5) == [0, 1, 3, 2]


def test_queue_forgets_the_removed_and_compacts_its_tombstones() -> None:
    queue, requests = _keyed(*map(float, range(300)))
    for req in requests:
        queue.push(req)
    for id in range(0, 299):
        assert queue.remove(id)
    assert not queue.remove(0)
    assert len(queue._heap) < 70
    assert [req.id for req in queue.requests()] == [299]
    assert _take_all(queue) == [299]
    aged = RankQueue(lambda req: (req.id,), share_every=2)
    for req in requests:
        aged.push(req)
    for id in range(0, 299):
        assert aged.remove(id)
    assert len(aged._by_age) < 70
    assert _take_all(aged) == [299]


def test_queue_refuses_the_same_request_twice() -> None:
    queue, requests = _keyed(0.0)
    queue.push(requests[0])
    with pytest.raises(AssertionError, match="in the queue already"):
        queue.push(requests[0])


def test_keys_chain_over_everything_before_them() -> None:
    seed = chain_seed("model", "tenant")
    keys = chain_keys(list(range(10)), 4, seed)
    assert len(keys) == 2
    assert chain_keys([9, *range(1, 10)], 4, seed)[1] != keys[1]
    assert chain_keys(list(range(10)), 4, chain_seed("model", "other"))[0] != keys[0]
    assert chain_seed("ab", "c") != chain_seed("a", "bc")
    assert extend_keys(keys, list(range(18)), 4, seed, 16) == chain_keys(list(range(16)), 4, seed)
    assert extend_keys([], list(range(16)), 4, seed, 3) == []


def test_a_long_prompt_has_room_for_its_first_tokens() -> None:
    req = _request(prompt=2000)
    size = sys.getsizeof(req.tokens)
    req.tokens += range(100)
    assert sys.getsizeof(req.tokens) == size, "the list was moved, which a step would have waited for"
    assert req.tokens[:2000] == list(range(2000))
    assert req.num_prompt == 2000


def test_index_keeps_the_first_block_of_a_prefix_and_one_key_per_block() -> None:
    index = PrefixIndex()
    index.publish([b"a", b"a"], [1, 2])
    index.publish([b"b"], [1])
    assert [index.find_chain([key]) for key in (b"a", b"b")] == [[1], []]
    assert (1 in index.key_of, 2 in index.key_of) == (True, False)
    index.forget(1)
    index.forget(1)
    assert index.find_chain([b"a"]) == []
    assert 1 not in index.key_of


def test_index_tells_of_each_key_that_comes_or_goes() -> None:
    told: list[tuple[bytes, bool]] = []
    index = PrefixIndex(lambda key, is_here: told.append((key, is_here)))
    index.publish([b"a", b"b", b"a"], [1, 2, 3])
    index.forget(1)
    index.forget(3)
    assert told == [(b"a", True), (b"b", True), (b"a", False)]


def test_a_block_is_computed_by_the_last_row_that_began_it() -> None:
    requests = [_request(id) for id in range(2)]
    blocked = BlockedOnPrefix(KVLedger(4, 4), requests, Policy(), WaitTotals(), lambda req: None)
    for row, req in enumerate(requests):
        req.row, req.keys, req.published = row, [b"a", b"b"], 1
        blocked.admitted(req)
    assert blocked.row_of == {b"b": 1}
    blocked.settle([b"b"], 0)
    assert blocked.row_of == {b"b": 1}
    blocked.settle([b"b"], 1)
    assert blocked.row_of == {}


def test_ledger_reserves_all_or_nothing() -> None:
    ledger = KVLedger(3, 4)
    first, second = _request(1, prompt=8), _request(2, prompt=8)
    assert ledger.adopt(first)
    assert not ledger.adopt(second)
    assert second.table == []
    assert ledger.pool.available == 1
    assert ledger.ensure(first, 8, 17) is None
    assert len(first.table) == 2
    assert not ledger.adopt(_request(3, prompt=4), spare=1)
    assert ledger.adopt(_request(3, prompt=4), spare=0)


def test_ledger_swaps_out_and_in_as_copies() -> None:
    ledger = KVLedger(3, 4, host_blocks=2)
    req = _request(1, prompt=8)
    ledger.adopt(req)
    req.num_computed = 6
    assert ledger.swap_out(req) is not None
    assert (req.table, len(req.host_table), req.num_computed) == ([], 2, 6)
    assert [(copy.src.tier, copy.dst.tier) for copy in ledger.drain(0)[0]] == [(0, 1), (0, 1)]
    blocker = _request(2, prompt=8)
    ledger.adopt(blocker)
    assert not ledger.adopt(req)
    ledger.free(blocker)
    assert ledger.adopt(req)
    assert [(copy.src.tier, copy.dst.tier) for copy in ledger.drain(0)[0]] == [(1, 0), (1, 0)]
    assert ledger.host.available == 2
    req.num_computed = 0
    assert ledger.swap_out(req) is None  # nothing computed, nothing to carry
    ledger.free(req)


def test_a_swapped_request_that_is_aborted_frees_its_host_blocks() -> None:
    rig = Rig(num_blocks=4, block_size=4, rows=2, tokens=8, host_blocks=4)
    req = rig.add(list(range(6)), 4)
    rig.step()
    preempt(rig.scheduler.state, req)
    assert req.host_table
    rig.abort(req.id)
    assert rig.ledger.host.available == 4


def test_preemption_takes_the_last_come_and_loses_no_output() -> None:
    rig = Rig(num_blocks=4, block_size=2, rows=2, tokens=8, victims=Victims.LAST_COME)
    rig.add([1, 2, 3], 5)
    rig.add([4, 5, 6], 5)
    rig.drain()
    rig.verify()
    assert rig.accepted[0].num_preempted == 0
    assert rig.accepted[1].num_preempted > 0


def test_preempted_requests_resume_before_requests_that_never_ran() -> None:
    class LastComeFirstServed(Policy):
        def key(self, req: Request) -> tuple[float, ...]:
            return (-req.arrival,)

    rig = Rig(rows=1, policy=LastComeFirstServed())
    first = rig.add([1, 2, 3], 5)
    rig.step()
    rig.add([4, 5, 6], 5)
    preempt(rig.scheduler.state, first)
    rig.step()
    assert first.row >= 0
    rig.drain()
    rig.verify()


def test_every_fourth_chunk_goes_to_the_oldest_prefill() -> None:
    rig = Rig(num_blocks=200, block_size=4, rows=8, tokens=8, chunk=8)
    rig.add(list(range(100, 400)), 1)
    rig.step()
    for i in range(12):
        rig.add([i] * 8, 1)
    for _ in range(12):
        rig.step()
    assert rig.accepted[0].num_computed >= 8 * 3
    rig.drain()
    rig.verify()


def test_finished_requests_leave_and_waiting_ones_join_at_the_next_step() -> None:
    for depth in (1, 2):
        rig = Rig(num_blocks=64, block_size=4, rows=2, tokens=32, depth=depth)
        for id in range(4):
            rig.add([id, id + 1], 3 if id % 2 else 5)
        rig.drain()
        rig.verify()
        num_slots = [len(plan.decode) + sum(1 for c in plan.chunks) for plan in rig.plans]
        assert num_slots[:6] == [2] * 6  # no slot is empty while a request waits


def test_the_decode_column_is_the_same_object_while_no_request_joins_or_leaves() -> None:
    rig = Rig(num_blocks=64, block_size=4, rows=2, tokens=32)
    rig.add([1, 2], 10)
    for _ in range(5):
        rig.step()
    assert rig.plans[2].decode is rig.plans[3].decode


def test_a_plan_lists_its_sampling_rows() -> None:
    chunks = [Chunk(3, 0, 5, Samples.NONE), Chunk(4, 2, 3, Samples.TOKEN)]
    plan = StepPlan(0, array("i", [0, 1]), chunks)
    assert plan.sampling_rows() == [0, 1, 4]


def test_results_out_of_order_are_a_bug_of_ours() -> None:
    rig = Rig(depth=2)
    rig.add([1, 2], 5)
    first = rig.scheduler.schedule(0.0)
    second = rig.scheduler.schedule(0.0)
    rig.executor.submit(first)
    rig.executor.submit(second)
    with pytest.raises(AssertionError, match="order of their plans"):
        rig.scheduler.commit(second, rig.executor.collect())


def test_aborting_an_unknown_request_does_nothing() -> None:
    rig = Rig()
    assert rig.scheduler.abort(5) is None


def test_the_waiting_queue_keeps_its_count() -> None:
    line = WaitingQueue(KVLedger(8, 4), [], Policy())
    leader, follower = _request(1), _request(2)
    line.push(leader)
    line.push(follower, leader)
    assert len(line) == 2
    line.remove(follower)
    assert len(line) == 1
    assert line.peek(0.0) is leader
    line.admit(leader)
    assert line.peek(0.0) is None


def test_a_scheduler_without_a_sink_is_silent() -> None:
    scheduler = Scheduler(KVLedger(8, 4), Limits(2, 8), Policy())
    scheduler.add(_request(1))
    assert scheduler.schedule(0.0) is not None
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
