"""The baselines: a batch is admitted when no request runs, and all of it ends together."""

from __future__ import annotations

import random

from headway.control.gates import BatchGate, NearLengths, NearQueue
from headway.core.request import Account, Request
from headway.values.params import SamplingParams


def test_a_static_batch_waits_until_no_request_runs() -> None:
    gate = BatchGate(4)
    assert gate.num_slots(now=0.0, num_running=0, num_waiting=9, oldest=0.0) == 4
    assert gate.num_slots(now=0.0, num_running=1, num_waiting=9, oldest=0.0) == 0
    assert gate.num_slots(now=0.0, num_running=0, num_waiting=1, oldest=0.0) == 4


def test_a_dynamic_batch_leaves_when_it_is_full_or_its_oldest_has_waited() -> None:
    gate = BatchGate(4, window=2.0)
    assert gate.num_slots(now=1.0, num_running=0, num_waiting=3, oldest=0.0) == 0
    assert gate.num_slots(now=1.0, num_running=0, num_waiting=4, oldest=0.0) == 4
    assert gate.num_slots(now=2.0, num_running=0, num_waiting=3, oldest=0.0) == 4


def _request(id: int, length: float, arrival: float | None = None) -> Request:
    at = float(id) if arrival is None else arrival
    return Request(id, [1], SamplingParams(max_tokens=10_000), arrival=at, expected=length)


def _take(queue: NearQueue, now: float, count: int) -> list[int]:
    taken = []
    for _ in range(count):
        head = queue.peek(now)
        assert head is not None
        queue.admit(head)
        taken.append(head.id)
    return taken


def test_the_oldest_leads_a_batch_of_answers_about_as_long() -> None:
    queue = NearLengths().queue()
    assert isinstance(queue, NearQueue)
    for id, length in enumerate([100, 5, 400, 120, 90, 6, 100, 380]):
        queue.push(_request(id, length))
    assert _take(queue, 1.0, 3) == [0, 6, 4], "itself, the other of 100, then 90 before 120"
    assert _take(queue, 2.0, 2) == [1, 5], "a new moment has a new oldest"
    assert _take(queue, 2.0, 1) == [3], "the batch goes on as it began, with the length nearest to 5"
    assert _take(queue, 3.0, 2) == [2, 7]
    assert queue.peek(4.0) is None
    assert not len(queue)


def test_batches_equal_those_of_a_full_search() -> None:
    rng, queue, waiting = random.Random(5), NearQueue(), {}
    for id in range(400):
        req = _request(id, rng.choice([3, 17, 18, 40, 200, 900]), arrival=rng.random())
        queue.push(req)
        waiting[id] = req
    for gone in rng.sample(sorted(waiting), 150):
        assert queue.remove(gone)
        assert not queue.remove(gone)
        del waiting[gone]
    assert sorted(req.id for req in queue.requests()) == sorted(waiting)
    for moment in range(25):
        lead = min(waiting.values(), key=lambda req: req.arrival).expected
        for id in _take(queue, float(moment), 10):
            # Of two equally near lengths either will do; within a length the oldest goes first.
            distances = [abs(req.expected - lead) for req in waiting.values()]
            assert abs(waiting[id].expected - lead) == min(distances)
            same = [req.arrival for req in waiting.values() if req.expected == waiting[id].expected]
            assert waiting.pop(id).arrival == min(same)
            assert id not in {req.id for req in queue.requests()}
    assert not queue._groups
    assert not queue._lengths


def test_buckets_have_no_second_choice_and_no_accounts() -> None:
    queue = NearQueue()
    queue.push(_request(1, 10))
    queue.charge(Account("", "ann"), 5.0)
    assert queue.forbids_backfill(0.0)
    assert queue.first(3, 0.0) == []


def test_the_place_in_a_batch_does_not_depend_on_the_cache() -> None:
    queue = NearQueue()
    requests = [_request(id, 10.0 + id) for id in range(3)]
    for req in requests:
        queue.push(req)
    queue.update(requests[2])
    assert _take(queue, 0.0, 3) == [0, 1, 2]
