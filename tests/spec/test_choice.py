"""How many draft tokens a step verifies: by acceptance, and by what steps of each size were seen to take."""

from __future__ import annotations

import random

import pytest

from headway.spec.acceptance import MODEL, OWN, PAST, Acceptances, kind_of
from headway.spec.choice import can_gain, lengths
from headway.spec.suffix import LONGEST
from headway.spec.verify_times import MOST_TOKENS, VerifyTimes


def by_weights(base: float, each: float) -> list[float]:
    return [0.0] + [base + each * n for n in range(1, MOST_TOKENS + 1)]


def test_where_tokens_are_free_all_guesses_are_verified_and_where_they_cost_as_much_as_steps_none() -> None:
    chances = [[0.9, 0.8, 0.7, 0.1]]
    assert lengths(by_weights(1.0, 0.0), 1, chances) == [4]
    assert lengths(by_weights(0.0, 1.0), 1, chances) == [0]


def test_a_guess_counts_as_long_as_it_is_worth_what_it_costs() -> None:
    # Four rows take 1.4, a draft token 0.1: at 4 tokens in 1.4 it must be right in more than 0.29.
    assert lengths(by_weights(1.0, 0.1), 4, [[0.9, 0.6, 0.2], [0.4], [], [0.25, 0.2]]) == [2, 1, 0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_give_more_tokens_per_second(seed: int) -> None:
    rng = random.Random(seed)
    times = [0.0]
    for _ in range(20):
        times.append(times[-1] + rng.random() * rng.choice((0.01, 0.3)) + (0.0 if times[-1] else 1.0))
    chances = []
    for _ in range(2):
        chance, row = 1.0, []
        for _ in range(3):
            chance *= rng.random()
            row.append(chance)
        chances.append(row)

    def rate(first: int, second: int) -> float:
        return (3 + sum(chances[0][:first]) + sum(chances[1][:second])) / times[3 + first + second]

    best = max(rate(first, second) for first in range(4) for second in range(4))
    chosen = lengths(times, 3, chances)
    assert rate(*chosen) == pytest.approx(best) or (chosen == [0, 0] and best <= 1.03 * rate(0, 0))


def test_nothing_is_guessed_before_a_step_was_seen_or_beside_more_rows_than_are_looked_at() -> None:
    assert lengths(VerifyTimes().table(), 1, [[0.9]]) == [0]
    assert lengths(by_weights(1.0, 0.0), MOST_TOKENS + 1, [[0.9]]) == [0]
    assert lengths(by_weights(1.0, 0.0)[:3], 1, [[0.9, 0.9]]) == [1], "as far as times are known"
    assert can_gain(by_weights(1.0, 0.05), 4, 8)
    assert not can_gain(by_weights(0.0, 1.0), 4, 8)


def test_guesses_of_a_draft_model_pay_for_its_rounds() -> None:
    times = by_weights(1.0, 0.0)
    chances = [[0.9, 0.8, 0.7], [0.9, 0.2]]
    assert lengths(times, 2, chances) == [3, 2]
    assert lengths(times, 2, chances, 0.5) == [1, 1], "the second row's guess costs no round of its own"
    assert lengths(times, 2, chances, 2.0) == [0, 0]
    assert not can_gain(times, 2, 8, 2.0)


def test_step_times_are_learned_filled_in_and_never_fall() -> None:
    times = VerifyTimes()
    for number, seconds in ((2, 1.0), (4, 3.0), (6, 2.0)):
        for _ in range(50):
            times.observe(number, seconds)
    table = times.table()
    assert table[:3] == [0.0, 1.0, 1.0]
    assert table[4] == table[5] == table[6] == pytest.approx(2.5), "six tokens take no less, by as many steps of each"
    assert table[3] == pytest.approx(1.75)
    assert table[6] < table[7] < 1.2 * table[6], "more than was seen costs a little more, so that it is tried"
    assert table == sorted(table)
    times.observe(0, 9.0)
    times.observe(MOST_TOKENS + 1, 9.0)
    assert times.table() == table


def test_one_quick_step_of_many_tokens_does_not_make_fewer_tokens_cheap() -> None:
    times = VerifyTimes()
    for _ in range(100):
        times.observe(16, 1.0)
    times.observe(30, 0.6)
    assert times.table()[16] > 0.98


def test_numbers_compare_though_the_machine_is_slower_for_a_while() -> None:
    times = VerifyTimes()
    for pace in (1.0, 2.0, 1.0, 2.0):
        for _ in range(100):
            times.observe(16, pace)
        for _ in range(5):
            times.observe(20, 1.2 * pace)
    table = times.table()
    assert table[20] / table[16] == pytest.approx(1.2, abs=0.07)
    assert table[16] == pytest.approx(2.0, abs=0.05), "seconds as they are now"
    for _ in range(5000):
        times.observe(16, 1.0)
    assert times.table()[20] == pytest.approx(1.32, abs=0.01), "long ago: as if it had never been seen"


def test_a_step_that_was_held_up_hardly_counts_and_an_old_average_is_given_up() -> None:
    times = VerifyTimes()
    for _ in range(50):
        times.observe(1, 1.0)
    times.observe(1, 1000.0)
    assert times.table()[1] < 1.2
    for _ in range(5000):
        times.observe(2, 9.0)
    times.observe(1, 5.0)
    assert times.table()[1] == 5.0


def test_a_request_begins_with_what_its_tenant_and_route_have_shown() -> None:
    all_of, kind = Acceptances(), kind_of(OWN, 2)
    first = all_of.of("ann", "chat")
    before = first.rate(kind)
    for _ in range(40):
        first.learn(kind, True)
    assert first.rate(kind) > 0.9 > before
    assert all_of.of("ann", "chat").rate(kind) > 0.8
    assert all_of.of("bob", "chat").rate(kind) > before, "a pair that is new begins with what all have shown"
    second = all_of.of("ann", "chat")
    for _ in range(60):
        second.learn(kind, False)
    assert second.rate(kind) < 0.2, "old guesses are forgotten"
    assert first.rate(kind_of(OWN, 3)) == Acceptances().of("", "").rate(kind_of(OWN, 3)), "kinds are apart"


def test_kinds_are_told_apart_and_longer_matches_are_trusted_more() -> None:
    record = Acceptances().of("", "")
    kinds = {kind_of(source, length) for source in (OWN, PAST, MODEL) for length in range(LONGEST + 1)}
    assert len(kinds) == 3 * (LONGEST + 1)
    assert record.rate(kind_of(MODEL, 0)) == record.rate(kind_of(MODEL, LONGEST))
    assert kind_of(OWN, LONGEST + 5) == kind_of(OWN, LONGEST)
    rates = [record.rate(kind_of(OWN, length)) for length in range(LONGEST + 1)]
    assert rates == sorted(rates)
    assert record.rate(kind_of(PAST, 2)) < record.rate(kind_of(OWN, 2))


def test_the_records_that_are_not_asked_for_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.spec.acceptance._MOST", 2)
    all_of, kind = Acceptances(), kind_of(OWN, 2)
    for _ in range(40):
        all_of.of("ann", "").learn(kind, True)
    known = all_of.of("ann", "").rate(kind)
    all_of.of("bob", "")
    all_of.of("cat", "")
    assert all_of.of("ann", "").rate(kind) < known
