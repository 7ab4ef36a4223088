"""Which of an engine's requests is to blame for its crash."""

from __future__ import annotations

import random

from headway.engine.suspects import Suspects


def test_after_a_first_crash_all_resume_together() -> None:
    suspects = Suspects()
    assert suspects.crashed([1, 2, 3]) is None
    assert all(suspects.admits(id) for id in (1, 2, 3, 4))
    assert not suspects.is_halving


def test_one_request_that_crashes_twice_alone_is_to_blame() -> None:
    suspects = Suspects()
    assert suspects.crashed([7]) is None
    assert suspects.crashed([7]) == 7
    assert not suspects.is_halving


def test_a_crash_after_progress_of_all_is_a_first_one() -> None:
    suspects = Suspects()
    suspects.crashed([1, 2])
    suspects.cleared(1)
    suspects.cleared(2)
    assert suspects.crashed([1, 2]) is None
    assert not suspects.is_halving


def test_only_the_group_on_trial_runs_and_the_next_one_follows_when_it_is_cleared() -> None:
    suspects = Suspects()
    suspects.crashed([1, 2, 3, 4])
    suspects.crashed([1, 2, 3, 4])
    assert [suspects.admits(id) for id in (1, 2, 3, 4, 5)] == [True, True, False, False, False]
    assert not suspects.cleared(1)
    assert suspects.cleared(2)
    assert [suspects.admits(id) for id in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
    assert not suspects.cleared(3)
    assert suspects.ended(4)
    assert suspects.admits(5)


def test_a_request_beside_others_is_not_blamed_before_it_ran_alone() -> None:
    suspects = Suspects()
    suspects.crashed([1, 2])
    suspects.crashed([1, 2])  # 1 is on trial, then 2 beside it
    suspects.cleared(1)
    assert suspects.crashed([1, 2]) is None
    assert [suspects.admits(id) for id in (1, 2)] == [False, True]
    assert suspects.crashed([2]) == 2
    assert suspects.admits(1)


def test_an_engine_that_crashed_before_it_had_a_request_blames_none() -> None:
    suspects = Suspects()
    suspects.crashed([1, 2, 3])
    suspects.crashed([1, 2, 3])
    assert suspects.crashed([]) is None
    assert [suspects.admits(id) for id in (1, 2, 3)] == [True, True, False]


def test_whatever_the_order_exactly_the_guilty_are_found_after_few_crashes() -> None:
    """Engines crash when a guilty request is in them; the others make progress in any order, or leave."""
    for seed in range(300):
        draw = random.Random(seed)
        num = draw.randrange(1, 40)
        guilty = set(draw.sample(range(num), draw.randrange(0, min(num, 3) + 1)))
        suspects, open_ids, blamed, num_crashes = Suspects(), set(range(num)), set[int](), 0
        while open_ids:
            held = sorted(id for id in open_ids if suspects.admits(id))
            assert held, "nothing may run: the rest would wait for ever"
            harmless = [id for id in held if id not in guilty]
            draw.shuffle(harmless)
            is_crashed = bool(guilty.intersection(held)) and draw.random() < 0.7
            for id in harmless[: draw.randrange(len(harmless) + 1) if is_crashed else None]:
                suspects.cleared(id)
                if draw.random() < 0.3:
                    suspects.ended(id)
                    open_ids.discard(id)
            held = [id for id in held if id in open_ids]
            if guilty.intersection(held):
                num_crashes += 1
                found = suspects.crashed(held)
                if found is not None:
                    blamed.add(found)
                    open_ids.discard(found)
            elif all(id not in guilty for id in open_ids):
                assert blamed == guilty, f"seed {seed}"
                break
        assert blamed == guilty, f"seed {seed}"
        assert num_crashes <= 2 + 8 * len(guilty), f"seed {seed}"
