"""Sharing, counted in computed tokens: prefixes, forks, arrivals in one step, whole prompts; at depth 1 and 2."""

import pytest

from headway.values.events import Admitted
from rig import Rig

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PREFIX = list(range(1000))


def _rig(depth: int, **shape) -> Rig:
    return Rig(**{"num_blocks": 400, "block_size": 16, "rows": 16, "tokens": 256, "depth": depth, **shape})


@DEPTHS
def test_second_request_computes_only_its_suffix(depth: int) -> None:
    rig = _rig(depth)
    rig.add([*PREFIX, 1, 2, 3], 2)
    rig.drain()
    before = rig.executor.computed_tokens
    second = rig.add([*PREFIX, 7, 8, 9, 10], 2)
    rig.drain()
    assert second.num_cached == 992  # 62 full blocks
    assert rig.executor.computed_tokens - before == 1004 - 992 + 1
    rig.verify()


@DEPTHS
def test_four_answers_compute_the_prompt_once_and_copy_at_most_three_blocks(depth: int) -> None:
    rig = _rig(depth)
    prompt = list(range(100))  # six blocks and a quarter
    first = rig.add(prompt, 8, seed=1)
    for seed in (2, 3, 4):
        rig.add(prompt, 8, seed=seed, parent=first.id)
    rig.drain()
    assert sum(chunk.count for plan in rig.plans for chunk in plan.chunks) == 100
    assert rig.executor.num_copies == 3
    assert sum(event.is_forked for event in rig.log.of(Admitted)) == 3
    rig.verify()


@DEPTHS
def test_a_prompt_that_ends_at_a_block_edge_is_forked_without_copies(depth: int) -> None:
    rig = _rig(depth)
    first = rig.add(list(range(96)), 8, seed=1)
    rig.add(list(range(96)), 8, seed=2, parent=first.id)
    rig.drain()
    assert rig.executor.num_copies == 0
    rig.verify()


@DEPTHS
def test_followers_without_a_slot_join_later_through_the_cache(depth: int) -> None:
    rig = _rig(depth, rows=2)
    first = rig.add(PREFIX[:64], 4, seed=1)
    for seed in (2, 3, 4):
        rig.add(PREFIX[:64], 4, seed=seed, parent=first.id)
    rig.drain()
    rig.verify()
    assert sum(chunk.count for plan in rig.plans for chunk in plan.chunks) <= 64 + 2 * 1


def test_followers_of_an_aborted_leader_run_on_their_own() -> None:
    rig = _rig(1, chunk=16)
    first = rig.add(PREFIX[:64], 4)
    rig.add(PREFIX[:64], 4, seed=2, parent=first.id)
    rig.step()
    rig.abort(first.id)
    rig.drain()
    rig.verify()
    assert len(rig.streams[1]) == 4


def test_a_follower_with_another_prompt_or_too_late_is_an_ordinary_request() -> None:
    rig = _rig(1)
    first = rig.add(PREFIX[:64], 6)
    rig.add(PREFIX[:63], 4, parent=first.id)
    rig.step()
    rig.add(PREFIX[:64], 4, parent=first.id)
    rig.add(PREFIX[:64], 4, parent=99)
    rig.drain()
    rig.verify()
    assert not any(event.is_forked for event in rig.log.of(Admitted))


@DEPTHS
def test_eight_arrivals_in_one_step_compute_their_prefix_at_most_once_and_a_quarter(depth: int) -> None:
    rig = _rig(depth)
    for i in range(8):
        rig.add([*PREFIX, 100 + i, i, i], 2)
    rig.drain()
    prefill = sum(chunk.count for plan in rig.plans for chunk in plan.chunks)
    assert prefill - 8 * 3 <= 1250
    rig.verify()


def test_waiters_do_not_hold_up_those_behind_them() -> None:
    rig = _rig(1, tokens=300, chunk=256)
    rig.add(PREFIX, 2)
    rig.add([*PREFIX, 1], 2)
    other = rig.add([5000, 5001], 2)
    rig.step()
    assert other.row >= 0
    rig.drain()
    rig.verify()


def test_a_blocked_request_stops_waiting_when_the_block_does_not_come() -> None:
    rig = _rig(1, rows=3, tokens=3, chunk=1)  # a block takes sixteen steps
    rig.add(PREFIX[:40], 1)
    waiter = rig.add(PREFIX[:40], 1)
    for step in range(5):
        assert waiter.row < 0, step
        rig.step()
    assert waiter.row >= 0
    rig.drain()
    rig.verify()


def test_waiters_return_when_the_row_they_wait_for_is_aborted() -> None:
    rig = _rig(1, chunk=16)
    leader = rig.add(PREFIX[:64], 1)
    waiter = rig.add(PREFIX[:64], 1)
    rig.step()
    rig.abort(leader.id)
    rig.step()
    assert waiter.row >= 0
    rig.drain()
    rig.verify()


def test_a_waiter_can_be_aborted() -> None:
    rig = _rig(1, chunk=16)
    rig.add(PREFIX[:64], 1)
    waiter = rig.add(PREFIX[:64], 1)
    rig.step()
    rig.abort(waiter.id)
    rig.drain()
    rig.verify()


@DEPTHS
def test_a_prompt_cached_whole_recomputes_one_token_and_writes_no_shared_block(depth: int) -> None:
    rig = _rig(depth)
    rig.add(PREFIX[:64], 2)
    rig.drain()
    before, copies = rig.executor.computed_tokens, rig.executor.num_copies
    again = rig.add(PREFIX[:64], 1)
    rig.drain()
    assert again.num_cached == 63
    assert rig.executor.computed_tokens - before == 1
    assert rig.executor.num_copies - copies == 1  # the last block was copied, then written
    rig.verify()


def test_without_room_for_the_copy_the_last_block_is_computed_anew() -> None:
    rig = Rig(num_blocks=2, block_size=4, rows=1, tokens=8)
    rig.add(PREFIX[:8], 1)
    rig.drain()
    again = rig.add(PREFIX[:8], 1)
    rig.drain()
    assert again.num_cached == 4
    rig.verify()


@DEPTHS
def test_output_blocks_serve_the_next_turn(depth: int) -> None:
    rig = _rig(depth)
    rig.add(PREFIX[:16], 33)
    rig.drain()
    second = rig.add(PREFIX[:16] + rig.streams[0], 2)
    rig.drain()
    assert second.num_cached == (48 if depth == 1 else 32)  # the last block was in flight when its row was given on
    rig.verify()


def test_tenants_share_nothing() -> None:
    rig = _rig(1)
    rig.add(PREFIX[:64], 1, tenant="a")
    rig.drain()
    other = rig.add(PREFIX[:64], 1, tenant="b")
    rig.drain()
    assert other.num_cached == 0
    rig.verify()


def test_a_partial_first_token_is_seen_before_the_prompt_ends() -> None:
    rig = _rig(1, chunk=16)
    rig.add(PREFIX[:64], 1)
    rig.step()
    rig.step()
    rig.add(PREFIX[:33], 1)
    rig.drain()
    assert rig.accepted[1].num_cached == 32
    rig.verify()


def test_a_plan_names_the_blocks_whose_content_was_given_up() -> None:
    rig = Rig(num_blocks=4, block_size=2, rows=2, tokens=8)
    rig.add([1, 2, 3], 1)
    rig.drain()
    rig.add([7] * 7, 1)  # all four: the first one's tail, which cannot be shared, and its head, evicted only now
    rig.step()
    rig.reset_cache()
    rig.add([8], 2)
    rig.drain()
    assert [plan.released for plan in rig.plans][:2] == [[], [1, 0]]
    assert [len(plan.released) for plan in rig.plans[2:]] == [4, 0], "each plan names them once"


def test_a_shared_block_is_given_up_by_the_last_that_uses_it_alone() -> None:
    rig = Rig(num_blocks=8, block_size=4, rows=3, tokens=16, caching=False)
    first = rig.add([1, 2, 3, 4, 5], 3)
    rig.add([1, 2, 3, 4, 5], 9, seed=1, parent=first.id)
    while rig.outcomes.get(first.id) is None:
        rig.step()
    held = set(rig.accepted[1].table)
    plan = rig.step()
    assert plan is not None
    assert plan.released
    assert not held & set(plan.released)
    rig.drain()


def test_draft_tokens_of_a_leader_are_not_written_into_the_block_that_its_followers_share() -> None:
    rig = Rig(num_blocks=20, block_size=4, rows=5, tokens=10, chunk=1)
    leader = rig.add([23, 11], 5, needs_feedback=True)
    rig.add([23, 11], 9, seed=1, parent=leader.id, needs_feedback=True)
    guessed = rig.expected(leader.id)[:2]
    rig.step()
    leader.draft = tuple(guessed)
    rig.step()  # the prompt's last token, and the fork
    rig.abort(leader.id)
    rig.step()
    rig.step()
    rig.add([23, 11, *guessed, 7], 4)
    rig.drain()
    rig.verify()
