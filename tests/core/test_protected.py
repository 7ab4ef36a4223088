"""Requests that were preempted as often as allowed: protected without a reservation, whatever they declare."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.core.policy import Policy
from headway.core.preemption import preempt, victim_order
from headway.core.request import Request
from headway.values.events import Admitted, Preempted
from headway.values.limits import Admission, Victims
from headway.values.states import State
from rig import Rig

STOP = tuple(range(4))  # one token in about twelve


def _steps(max_tokens: int, **rules: object) -> tuple[int, Rig]:
    """Steps that the same answers take, most of which end by a stop token, with so many tokens declared."""
    rig = Rig(num_blocks=160, block_size=2, rows=24, tokens=64, **rules)
    rig.scheduler.state.ceiling_of = lambda req: 24.0
    for i in range(120):
        rig.add([i % 50, i // 50, i % 7, 1], max_tokens, stop=STOP, seed=i)
    rig.drain()
    return len(rig.plans), rig


@pytest.mark.parametrize("preemptions", [1, 3])
def test_what_a_request_declares_does_not_change_how_long_all_of_them_take(preemptions: int) -> None:
    few, rig = _steps(80, preemptions=preemptions, victims=Victims.LAST_COME)
    many, other = _steps(300, preemptions=preemptions, victims=Victims.LAST_COME)
    assert max(len(stream) for stream in other.streams.values()) <= 80, "the answers are the same"
    assert max(req.num_preempted for req in rig.accepted.values()) >= preemptions
    assert many <= 1.05 * few


class Classes(Policy):
    def rank(self, req: Request) -> int:
        return req.priority


def _protected(rig: Rig, *requests: Request) -> None:
    """As if each had been preempted once for memory."""
    for req in requests:
        preempt(rig.scheduler.state, req)


def test_a_protected_request_comes_back_as_soon_as_its_known_tokens_fit() -> None:
    rig = Rig(num_blocks=32, block_size=2, rows=4, preemptions=1)
    long, other = rig.add([1] * 4, 58), rig.add([2] * 4, 20)
    rig.step()
    _protected(rig, long)
    rig.step()
    assert long.row >= 0, "29 more blocks are not there, and not asked for"
    rig.drain()
    rig.verify()
    assert (long.num_preempted, other.num_preempted) == (1, other.num_preempted)


def test_protected_requests_run_beside_each_other_while_their_likely_lengths_fit() -> None:
    rig = Rig(num_blocks=20, block_size=2, rows=8, tokens=32, preemptions=1)
    rig.scheduler.state.ceiling_of = lambda req: 10.0
    ones = [rig.add([i] * 4, 30) for i in range(4)]  # 14 tokens each are likely, 34 possible; memory holds 40
    rig.step()
    _protected(rig, *ones)
    rig.step()
    assert [req.row >= 0 for req in ones] == [True, True, False, False]


def test_a_protected_request_that_waits_for_others_does_not_block_the_queue() -> None:
    rig = Rig(num_blocks=20, block_size=2, rows=8, tokens=32, preemptions=1)
    rig.scheduler.state.ceiling_of = lambda req: 20.0
    first, second = rig.add([1] * 4, 30), rig.add([2] * 4, 30)
    rig.step()
    _protected(rig, first, second)
    new = rig.add([3] * 4, 3)
    rig.step()
    assert (first.row >= 0, second.row >= 0, new.row >= 0) == (True, False, True)
    rig.drain()
    rig.verify()


def test_a_protected_request_that_finds_no_memory_alone_is_not_overtaken() -> None:
    rig = Rig(num_blocks=12, block_size=2, rows=4, tokens=32, preemptions=1)
    rig.scheduler.state.ceiling_of = lambda req: 1.0
    big, other = rig.add([1] * 14, 8), rig.add([2] * 4, 12)
    rig.step()
    rig.step()
    _protected(rig, big)
    rig.add([3] * 6, 3)
    rig.add([4] * 6, 3)
    for _ in range(30):
        rig.step()
    joined = [event.id for event in rig.log.of(Admitted)]
    assert joined.index(big.id, 1) < joined.index(3), "it would wait for ever"
    rig.drain()
    rig.verify()
    assert other.num_preempted <= 2


def test_unprotected_rows_yield_first_then_the_youngest_protected_once() -> None:
    rig = Rig(num_blocks=12, block_size=2, rows=4, tokens=32, preemptions=1)
    rig.scheduler.state.ceiling_of = lambda req: 1.0  # the estimate is wrong: both write 18
    old, young = rig.add([1] * 2, 18), rig.add([2] * 2, 18)
    rig.step()
    _protected(rig, old, young)
    new = rig.add([3] * 2, 18)
    rig.drain()
    rig.verify()
    assert (old.num_preempted, young.num_preempted) == (1, 2)
    lost = rig.log.of(Preempted)
    assert [event.id for event in lost if event.is_protected] == [young.id]
    assert next(event.id for event in lost[2:]) == new.id


def test_what_has_yielded_is_senior_and_runs_beside_its_like_only_with_room_to_spare() -> None:
    rig = Rig(num_blocks=40, block_size=2, rows=8, tokens=32, preemptions=1)
    rig.scheduler.state.ceiling_of = lambda req: 11.0
    ones = [rig.add([i] * 4, 30) for i in range(4)]
    rig.step()
    _protected(rig, *ones)
    rig.step()
    assert all(req.row >= 0 for req in ones)
    _protected(rig, *ones[1:])
    rig.step()
    assert [req.row >= 0 for req in ones] == [True, True, True, False]  # 80 tokens: 15 and twice 26, not thrice
    assert max(ones[:3], key=lambda req: victim_order(rig.scheduler.state, req)) is ones[0]
    rig.drain()
    rig.verify()


def test_what_has_yielded_is_expected_to_grow_to_twice_its_likely_length() -> None:
    rig = Rig(num_blocks=20, block_size=2, rows=4, tokens=32, preemptions=1, admission=Admission.PEAK)
    rig.scheduler.state.ceiling_of = lambda req: 30.0 - 19.0 * req.id
    long, short = rig.add([1] * 4, 30), rig.add([2] * 4, 30)
    joined = []
    for _ in range(3):
        rig.step()
        joined.append(short.row >= 0)
        if short.row >= 0:
            _protected(rig, short)
    assert joined == [True, True, False]  # 40 tokens: 34 and 15 are never there together, 34 and 26 would be
    assert long.row >= 0
    rig.drain()
    rig.verify()


def test_a_more_urgent_class_goes_before_a_protected_request() -> None:
    rig = Rig(num_blocks=64, block_size=2, rows=1, policy=Classes(), preemptions=1)
    low = rig.add([1] * 4, 6, priority=5)
    rig.step()
    high = rig.add([2] * 4, 6, priority=1)
    _protected(rig, low)
    rig.step()
    assert (low.row >= 0, high.row >= 0) == (False, True)
    rig.abort(low.id)
    rig.drain()
    rig.verify()


@pytest.mark.parametrize("num_blocks", [9, 11])
def test_a_chunk_of_a_protected_row_waits_where_every_other_row_has_its_block(num_blocks: int) -> None:
    """The row needs feedback, so it is planned after the rows that decode; it must not yield to them for that."""
    rig = Rig(num_blocks=num_blocks, block_size=1, rows=3, tokens=8, preemptions=1)
    rig.scheduler.state.ceiling_of = lambda req: 1.0
    patient = rig.add([1], 6, needs_feedback=True)
    others = [rig.add([2], 6), rig.add([3], 6)]
    rig.step()
    _protected(rig, patient, *others)
    rig.drain()
    rig.verify()
    assert patient.num_preempted == 1
    assert sum(req.num_preempted for req in others) <= 3


@pytest.mark.parametrize("num_tokens", [5, 9])
def test_a_chunk_waits_rather_than_take_the_blocks_of_a_row_that_has_yielded(num_tokens: int) -> None:
    """A new one has its blocks in this plan, so it is no victim; in the next step it may be."""
    rig = Rig(num_blocks=8, block_size=4, tokens=32, caching=False, preemptions=1)
    patient, decoding = rig.add([1, 2], 10, needs_feedback=True), rig.add([3, 4, 5, 6], 8)
    for _ in range(2):
        rig.step()
        _protected(rig, patient, decoding)
    while len(patient.tokens) < num_tokens:  # the last one begins a block
        rig.step()
    new = rig.add(list(range(4 * rig.ledger.num_free - 1)), 2)
    rig.step()
    assert new.row >= 0, "it got all that was free"
    rig.drain()
    rig.verify()
    assert (patient.num_preempted, decoding.num_preempted) == (2, 2)


def test_protected_rows_do_not_preempt_each_other_while_kv_that_waits_can_be_freed() -> None:
    rig = Rig(num_blocks=17, block_size=1, rows=2, tokens=8, depth=3, preemptions=1)
    first, second = rig.add(list(range(5)), 6), rig.add([50, 51], 4)
    rig.add(list(range(60, 74)), 2)  # the head: too large beside the two, and not overtaken
    rig.step()
    loading = rig.add(list(range(30, 38)), 3, state=State.LOADING)
    rig.load(loading.id, 8)
    rig.step()
    for req in (first, second):
        preempt(rig.scheduler.state, req)
    rig.drain(200)
    rig.verify()
    assert (first.num_preempted, second.num_preempted) == (1, 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("admission", [Admission.PEAK, Admission.OPTIMISTIC])
def test_what_has_yielded_never_yields_again_though_answers_are_longer_than_learned(
    admission: Admission, depth: int
) -> None:
    for learned in (1.0, 4.0):
        rig = Rig(num_blocks=60, block_size=1, rows=12, tokens=64, depth=depth, admission=admission)
        rig.scheduler.state.ceiling_of = lambda req, learned=learned: learned
        for i in range(40):
            rig.add([i, 7 * i % 50, *[1] * (i % 5)], 20 + i * 13 % 20, seed=i)
        rig.drain(5000)
        rig.verify()
        assert max(req.num_preempted for req in rig.accepted.values()) <= 3 + 1
        num_yields = Counter(event.id for event in rig.log.of(Preempted) if event.is_protected)
        assert set(num_yields.values()) <= {1}
